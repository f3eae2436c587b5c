"""Sizes of the norm kernels: functions of the row's width and of nothing else, since they decide the order of its sum. Not tuned on a GPU yet."""

from __future__ import annotations

# Widths of the dense Qwen3 models (0.6B, 1.7B, 4B, 8B and 14B, 32B): what the compile gate compiles.
WIDTHS = (1024, 2048, 2560, 4096, 5120)


def row_tile(width: int) -> tuple[int, int]:
    """(block, warps) for a row of `width` elements: the next power of two, and a warp for each 512 of them: two loads of 16 bytes a thread in bf16."""
    block = 1 << max(0, width - 1).bit_length()
    return block, min(16, max(1, block // 512))
