"""Sizes of the gated norm: a function of the head's width alone, since it decides the order of a head's sum. Not tuned on a GPU yet."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK, WARPS = 1024, 4  # elements of a program, 8 a thread


def head_tile(head_dim: int) -> int:
    """Heads of a program. Raises ValueError where head_dim is none of HEAD_DIMS."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: the gated norm needs one of {HEAD_DIMS}")
    return BLOCK // head_dim
