"""Gated DeltaNet's recurrence in plain PyTorch, token by token. Not used by the engine: it says what the kernels compute."""

from __future__ import annotations

import torch


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [L, nv, dv] and the state behind the last token, both in the dtype of `state` [nv, dk, dv], which is left as it is.

    q, k  [L, nk, dk], as they enter (normed and scaled already); value head j reads key head j // (nv / nk)
    v     [L, nv, dv]; log_decay and beta [L, nv]
    """
    group, wide = v.shape[1] // k.shape[1], state.dtype
    q, k = (x.to(wide).repeat_interleave(group, dim=1) for x in (q, k))  # [L, nv, dk] each
    v, kept, beta = v.to(wide), log_decay.to(wide).exp(), beta.to(wide)
    outputs = []
    for t in range(len(v)):
        state = state * kept[t, :, None, None]
        recalled = torch.einsum("hde,hd->he", state, k[t])
        state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - recalled))[:, None, :]
        outputs.append(torch.einsum("hde,hd->he", state, q[t]))
    return torch.stack(outputs), state
