"""Tiles of a layer's experts: per device family and dtype, by the pairs that an expert gets on average. Bits do not depend on them, time does.

Of 9.0 they are the fastest that bench/probes/moe.py found on an H200 in bf16, for 35B-A3B's 256 experts and 30B-A3B's 128 (bench/probes/RESULTS.md). The
others are not tuned: their shapes follow those of kernels/matmul/tiles.py for as many rows, half as wide where two products run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinfer.kernels.matmul.tiles import family


@dataclass(frozen=True, slots=True)
class Tile:
    """bn weight rows (of the gate, and as many of up), bk of K a step; swap and tma as in `experts_kernel`; group: tiles of pairs that share a pass."""

    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    group: int = 8

    def shared_bytes(self, rows: int, itemsize: int, gated: bool) -> int:
        """Most shared memory of a program: a buffer of every operand a stage, through TMA a barrier of 8 bytes for each of up to two, and a few more."""
        return self.stages * ((rows + (2 if gated else 1) * self.bn) * self.bk * itemsize + 16) + 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows: pairs of a tile, of both products, as `group` lists them."""

    rows: int
    gate_up: Tile
    down: Tile


Row = tuple[Tiling, ...]
BOUNDS = (1, 8, 48, 96)
"""A Row holds a tiling for up to so many pairs an expert on average, and one for more."""
LEAST_ROWS = 16  # of every tiling: with it, `max_tiles` bounds every list

# Rows of 16: an expert's weight is read once, as it is in wider tiles, and time is that of reading. A step of one token has k tiles, and narrow ones are needed
# to occupy the device.
_TABLE: Mapping[str, Row] = {
    "9.0": (
        Tiling(16, Tile(32, 128, 4, 5), Tile(64, 128, 4, 4, swap=True)),
        Tiling(16, Tile(32, 128, 4, 5), Tile(128, 128, 4, 3, swap=True)),
        Tiling(32, Tile(64, 128, 4, 3), Tile(128, 64, 4, 4, swap=True, tma=True)),
        Tiling(64, Tile(64, 64, 4, 4, tma=True), Tile(128, 64, 4, 4, tma=True)),
        Tiling(128, Tile(128, 64, 8, 3, tma=True), Tile(256, 64, 8, 3, tma=True)),
    ),
    "10.0": (
        Tiling(16, Tile(32, 128, 4, 5), Tile(32, 256, 4, 4)),
        Tiling(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)),
        Tiling(32, Tile(64, 128, 4, 3), Tile(128, 64, 4, 4)),
        Tiling(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
        Tiling(128, Tile(64, 64, 8, 4), Tile(128, 64, 8, 3)),
    ),
    "8.0": (
        Tiling(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
        Tiling(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
        Tiling(32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 3)),
        Tiling(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        Tiling(128, Tile(64, 32, 8, 4), Tile(128, 64, 8, 3)),
    ),
    "8.6": (
        Tiling(16, Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
        Tiling(16, Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
        Tiling(32, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        Tiling(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
        Tiling(128, Tile(64, 32, 8, 4), Tile(128, 32, 8, 4)),
    ),
}

# float32 with IEEE products runs on plain multiply-adds: small tiles, the same everywhere.
_IEEE_FEW, _IEEE = Tiling(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)), Tiling(64, Tile(32, 32, 8, 2), Tile(64, 32, 8, 2))
_FLOAT32: Row = (_IEEE_FEW, _IEEE_FEW, _IEEE, _IEEE, _IEEE)

# The interpreter's time is per operation, not per element, and numpy's bits depend on the tile: one tiling for every step.
INTERPRETER = Tiling(16, Tile(128, 128, 4, 1), Tile(128, 128, 4, 1))

COMBINE_BLOCK, COMBINE_WARPS = 1024, 4  # 8 elements a thread: one load of 16 bytes in bf16 for each expert. Not tuned on a GPU yet


def tiling_for(capability: tuple[int, int] | None, dtype: torch.dtype, num_pairs: int, num_experts: int) -> Tiling:
    """The tiling for a step with room for num_pairs pairs on a device of `capability`; None stands for the interpreter."""
    if capability is None:
        return INTERPRETER
    column = sum(num_pairs > bound * num_experts for bound in BOUNDS)
    return (_FLOAT32 if dtype == torch.float32 else _TABLE[family(capability)])[column]


def entries(name: str, dtype: torch.dtype) -> tuple[Tiling, ...]:
    """Every tiling that `tiling_for` can answer for a family and dtype, each once."""
    return tuple(dict.fromkeys(_FLOAT32 if dtype == torch.float32 else _TABLE[name]))
