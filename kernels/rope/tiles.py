"""Sizes of the rope kernel: functions of head_dim alone, since they decide the order of a head's sum of squares. Not tuned on a GPU yet."""

from __future__ import annotations

# head_dim -> (heads a program, warps): 1024 elements a program, 8 a thread, so that a head's sum stays inside one warp.
_TABLE = {64: (16, 4), 128: (8, 4), 256: (4, 4)}
HEAD_DIMS = tuple(_TABLE)


def head_tile(head_dim: int) -> tuple[int, int]:
    """(heads a program, warps) for heads of `head_dim` elements, a power of two; the tests' small heads go 16 to a program."""
    if head_dim < 2 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim {head_dim}: the rope kernel needs a power of two")
    return _TABLE.get(head_dim, (16, 1) if head_dim < 64 else (1, 4))
