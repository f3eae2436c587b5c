"""The gated norm in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """out = weight * x / root mean square of x, in each head, times silu(gate).

    x       [T, nv, dv]
    gate    [T, nv dv], x's dtype, rows of any stride: a slice of a projection's output
    weight  [dv], plain (not 1 + weight); x's dtype or float32
    out     [T, nv dv], x's dtype

    The norm is rounded to x's dtype before the weight multiplies it, the product is rounded where the weight has that dtype, and the gate's product last.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    u = x.to(wide)
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_((weight * u.to(x.dtype) * F.silu(gate.view(x.shape).to(wide))).to(x.dtype).flatten(1))
