"""Embedding in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def embedding(token_ids: torch.Tensor, feed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = weight[id of t].

    token_ids  [T] int32; a negative entry -(s + 1) stands for the token that the device sampled last for batch slot s, feed[s]
    feed       [slots] int32
    weight     [V, h]
    out        [T, h]
    """
    fed = feed[(-token_ids.long() - 1).clamp(min=0)].long()
    out.copy_(weight[torch.where(token_ids < 0, fed, token_ids.long())])
