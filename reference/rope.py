"""Reference. Slow on purpose: rotary position embedding as formulas. No table of precomputed angles; the frequencies are `twinfer.engine.frequencies`.

The order of the operations is transformers', so that in fp32 the angles have the same bits.
"""

from __future__ import annotations

import torch


def cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every token's angles, each [num_tokens, head_dim] in `dtype`; angles are computed in inv_freq's dtype and rounded last.

    positions [num_tokens] integers, inv_freq [head_dim / 2] wide.
    """
    angles = positions.to(inv_freq.dtype)[:, None] * inv_freq  # [num_tokens, head_dim / 2]
    angles = torch.cat((angles, angles), dim=-1)  # [num_tokens, head_dim]: both halves of a head turn by the same angles
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim] with dims j and j + head_dim / 2 turned as a pair; cos and sin [num_tokens, head_dim]. All in x's dtype."""
    first, second = x.chunk(2, dim=-1)  # [num_tokens, num_heads, head_dim / 2] each
    turned = torch.cat((-second, first), dim=-1)  # [num_tokens, num_heads, head_dim]
    return x * cos[:, None] + turned * sin[:, None]  # [num_tokens, num_heads, head_dim]
