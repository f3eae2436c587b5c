"""Tiles of the matmul kernel: per device family and dtype, by the number of tokens and the weight's shape. Bits do not depend on them, time does.

Family 9.0 in bf16 was tuned on one NVIDIA H200 (Triton 3.6.0) for the weights of Qwen3-0.6B, 4B, 8B and 32B: the fastest of 18 to 27 tiles at each of
M = 1, 16, 64, 128, 256, 2048, 8192 (bench/probes, records `probe_matmul_*`). All other entries are untimed: they compile within the family's
shared memory, and their shapes follow the tuned ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """bm tokens x bn weight rows, bk of K a step; swap and tma as in `matmul_kernel`; group: token tiles that share a pass over the weight."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    group: int = 8

    def shared_bytes(self, itemsize: int) -> int:
        """Most shared memory of a program: a buffer of both operands a stage, through TMA a barrier of 8 bytes a stage, and a few more on 10.0.

        Kernels with wgmma take this but for the last 32; with mma.sync the compiler saves a stage or two.
        """
        return self.stages * ((self.bm + self.bn) * self.bk * itemsize + 8) + 32


Row = tuple[Tile, ...]
BOUNDS = (16, 64, 128, 256, 4096)
"""A Row holds a tile for M up to each bound, and one for more."""

# Largest shared memory of one program in bytes, by family: CUDA programming guide, table of technical specifications by compute capability.
SHARED_LIMIT: Mapping[str, int] = {"8.0": 163 * 1024, "8.6": 99 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024}
_FAMILY = {(8, 0): "8.0", (8, 7): "8.0", (9, 0): "9.0", (10, 0): "10.0", (10, 3): "10.0"}


def family(capability: tuple[int, int]) -> str:
    """The table's key. 8.6 stands for all that allow 99 KiB a program (8.6, 8.9, 12.0), and for every device unknown: its tiles run anywhere."""
    return _FAMILY.get(capability, "8.6")


# M <= 16: narrow tiles and deep pipelines, since time is that of reading the weight once.
_A4, _A6, _A10 = (Tile(16, 64, 128, 4, s, swap=True) for s in (4, 6, 10))
_B6, _B5 = Tile(16, 64, 64, 4, 6, swap=True), Tile(16, 64, 256, 4, 5, swap=True)
_C10, _C8 = Tile(16, 16, 256, 4, 10), Tile(16, 32, 256, 4, 8)
# M <= 64
_D4, _D8 = Tile(64, 32, 256, 4, 4, tma=True), Tile(64, 32, 128, 4, 8, tma=True)
_E6, _E5 = Tile(64, 64, 128, 4, 6, tma=True), Tile(64, 64, 64, 4, 5, tma=True)
_F4, _F3 = Tile(64, 128, 64, 4, 4, tma=True), Tile(64, 128, 64, 4, 3)
# M <= 256
_G6, _G4 = Tile(128, 64, 64, 4, 6, tma=True), Tile(128, 64, 128, 4, 4, tma=True)
_H4 = Tile(64, 256, 64, 4, 4, tma=True)
# more
_L3, _L4, _M3 = Tile(128, 128, 64, 4, 3, tma=True), Tile(128, 128, 64, 8, 4, tma=True), Tile(256, 128, 64, 8, 3, tma=True)

# Weight shape (N, K) -> tiles. The head was timed up to M = 256.
_TUNED: Mapping[tuple[int, int], Row] = {
    # 0.6B: qkv, o, gate_up, down, lm_head
    (4096, 1024): (_A6, _D4, _E6, _E5, _L3, _L3),
    (1024, 2048): (_C10, _D4, _D4, _D4, _L4, _L3),
    (6144, 1024): (_A6, _E6, _E5, _F4, _L3, _L3),
    (1024, 3072): (_C10, _D4, _D4, _D4, _H4, _L3),
    (151936, 1024): (_B6, _E5, _L3, _L3, _L3, _L3),
    # 4B
    (6144, 2560): (_A6, _E6, _G4, _F4, _L3, _L3),
    (2560, 4096): (_A10, _D8, _E6, _G6, _H4, _L3),
    (19456, 2560): (_B6, _F4, _F3, _F4, _L3, _L3),
    (2560, 9728): (_C8, _D8, _E6, _G6, _H4, _H4),
    (151936, 2560): (_B5, _F3, _L3, _L3, _L3, _L3),
    # 8B
    (6144, 4096): (_A6, _E6, _G4, _F4, _L3, _L3),
    (4096, 4096): (_A10, _D4, _E6, _G6, _L3, _M3),
    (24576, 4096): (_B6, _F4, _L3, _H4, _L3, _L3),
    (4096, 12288): (_A10, _D4, _E6, _G6, _M3, _L4),
    (151936, 4096): (_A4, _F3, _L3, _L3, _L3, _L3),
    # 32B
    (10240, 5120): (_A4, _E5, _F4, _L3, _L3, _L3),
    (5120, 8192): (_A6, _E6, _G4, _F4, _L4, _L4),
    (51200, 5120): (_B5, _E6, _L3, _L3, _L3, _L3),
    (5120, 25600): (_B5, _E6, _G4, _F4, _L4, _H4),
    (151936, 5120): (_A4, _F3, _L3, _L3, _L3, _L3),
}

# Any other weight: rows by the largest N that each serves, the tuned neighbours' tiles.
_BY_WIDTH: Mapping[str, tuple[tuple[int | None, Row], ...]] = {
    "9.0": (
        (1024, (_C10, _D4, _D4, _D4, _L3, _L3)),
        (5120, (_A10, _D4, _E6, _G6, _L3, _L3)),
        (12288, (_A6, _E6, _G4, _F4, _L3, _L3)),
        (None, (_A4, _F4, _L3, _L3, _L3, _L3)),
    ),
    "10.0": ((5120, (_A6, _E6, _E6, _G6, _L3, _L3)), (None, (_A6, _F4, _L3, _L3, _L3, _L3))),
    "8.0": (
        (
            None,
            (
                Tile(16, 64, 128, 4, 5),
                Tile(64, 64, 64, 4, 5),
                Tile(64, 128, 64, 4, 4),
                Tile(128, 128, 64, 8, 3),
                Tile(128, 128, 64, 8, 3),
                Tile(128, 128, 64, 8, 3),
            ),
        ),
    ),
    "8.6": (
        (
            None,
            (
                Tile(16, 64, 128, 4, 4),
                Tile(64, 64, 64, 4, 4),
                Tile(64, 128, 64, 4, 3),
                Tile(64, 128, 64, 4, 3),
                Tile(128, 128, 32, 8, 4),
                Tile(128, 128, 32, 8, 4),
            ),
        ),
    ),
}

# float32 with IEEE products runs on plain multiply-adds: small tiles, the same everywhere.
_IEEE_FEW, _IEEE = Tile(16, 32, 32, 4, 2), Tile(64, 64, 32, 8, 3)
_FLOAT32: Row = (_IEEE_FEW, _IEEE, _IEEE, _IEEE, _IEEE, _IEEE)

# The interpreter's time is per operation, not per element, and numpy's bits depend on the tile: one tile for every M.
INTERPRETER = Tile(64, 128, 128, 4, 1)


def tile_for(capability: tuple[int, int] | None, dtype: torch.dtype, m: int, n: int, k: int) -> Tile:
    """The tile for x [m, k] and weight [n, k] of `dtype` on a device of `capability`; None stands for the interpreter."""
    if capability is None:
        return INTERPRETER
    column = sum(m > bound for bound in BOUNDS)
    if dtype == torch.float32:
        return _FLOAT32[column]
    name = family(capability)
    row = _TUNED.get((n, k)) if name == "9.0" else None
    if row is None:
        row = next(r for largest, r in _BY_WIDTH[name] if largest is None or n <= largest)
    return row[column]


def entries(name: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that `tile_for` can answer for a family and dtype, each once."""
    rows = [_FLOAT32] if dtype == torch.float32 else [row for _, row in _BY_WIDTH[name]] + (list(_TUNED.values()) if name == "9.0" else [])
    return tuple(dict.fromkeys(tile for row in rows for tile in row))
