"""Sizes of the kernels of a Gated DeltaNet layer's inputs: functions of the head's width alone, since they decide the order of its sum. Not tuned yet."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK, WARPS = 1024, 4  # channels of a program, 8 a thread: one load of 16 bytes in bf16 a tap


def head_tile(head_dim: int) -> int:
    """Heads of a program. Raises ValueError where head_dim is none of HEAD_DIMS."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: Gated DeltaNet's kernels need one of {HEAD_DIMS}")
    return BLOCK // head_dim
