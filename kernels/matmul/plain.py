"""Product of activations with a weight in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out = x weight^T + bias, summed in float32 (float64 for float64) and rounded once.

    x       [M, K]
    weight  [N, K], x's dtype
    out     [M, N], x's dtype or float32
    bias    [N], x's dtype, or None
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(wide) @ weight.to(wide).T
    out.copy_(total if bias is None else total + bias.to(wide))
