"""SwiGLU in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def swiglu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up; silu is rounded to the dtype before the product, as two operations in that dtype are.

    gate_up  [T, 2 I]: gate in columns 0 .. I - 1, up in I .. 2 I - 1
    out      [T, I], gate_up's dtype
    """
    gate, up = gate_up.chunk(2, dim=1)
    out.copy_(F.silu(gate) * up)
