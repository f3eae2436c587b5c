"""Tiles of Gated DeltaNet's kernels by device, dtype and head dims. Bits do not depend on them, time does. No torch, no kernel.

Found by bench/probes/gdn.py for 16 key and 32 value heads of 128 in bf16 on one H200 (Triton 3.6.0; bench/probes/RESULTS.md): two launches for rows of one
token from 128 rows on, one below; BV 32 or less repeats the key side too often. All other entries are untimed: they compile within the device's shared
memory.

num_stages = 1 is forbidden for the value side of long rows: on that device it gave wrong outputs at BV 16 and 32 (0.84 relative, NaN) and was the
fastest. Stages 2 and 3 gave the right bits at every BV. The cause is not known: no buffer is both loaded and stored in the loop, and in the PTX of
Triton 3.6.0 and 3.7.1 a barrier and a proxy fence stand wherever shared memory is used again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinfer.kernels.attention.tiles import shared_limit

HEAD_DIMS = (16, 32, 64, 128)
ROUNDS = 15  # of the substitution in a block of 16 rows. Arithmetic: fewer leave rows unsolved


@dataclass(frozen=True, slots=True)
class LongTile:
    """bv: columns of a value head a program; the warps of each side; stages of the value side's loop."""

    bv: int
    key_warps: int
    value_warps: int
    stages: int

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"stages {self.stages}: fewer than 2 computed wrong values on a GPU")


@dataclass(frozen=True, slots=True)
class SingleTile:
    """fused: one launch, else two. bv and bk: columns and rows of the anchor at a time; second_bv, second_warps: of the second launch."""

    fused: bool
    bv: int
    bk: int
    warps: int
    stages: int
    second_bv: int = 128
    second_warps: int = 4


@dataclass(frozen=True, slots=True)
class CommitTile:
    """bv and bk: columns and rows of the anchor at a time."""

    bv: int
    bk: int
    warps: int


LONG = LongTile(32, 4, 4, 3)
# Least number of rows -> tile.
SINGLES: tuple[tuple[int, SingleTile], ...] = (
    (128, SingleTile(False, 128, 64, 4, 2)),
    (8, SingleTile(True, 128, 64, 4, 2)),
    (1, SingleTile(True, 64, 128, 4, 2)),
)
COMMIT = CommitTile(64, 64, 4)
# What fits the shared memory of every device, from compute capability 8.0; and float32 everywhere, whose IEEE products run on plain multiply-adds.
ELSEWHERE = LongTile(16, 4, 4, 2), SingleTile(True, 32, 32, 4, 2, 32, 4), CommitTile(32, 32, 4)


def _check(key_dim: int, value_dim: int) -> None:
    for name, value in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if value not in HEAD_DIMS:
            raise ValueError(f"{name} {value}: Gated DeltaNet's kernels need one of {HEAD_DIMS}")


def _fits(capability: tuple[int, int] | None, itemsize: int, key_dim: int) -> None:
    if itemsize == 4 and key_dim == 128 and capability is not None and shared_limit(capability) < 160 * 1024:
        raise ValueError(f"key_head_dim 128 in float32 needs 106 KiB of shared memory a block, a device of {capability[0]}.{capability[1]} has 99")


def _hopper(capability: tuple[int, int] | None, itemsize: int, key_dim: int) -> bool:
    return capability == (9, 0) and itemsize == 2 and key_dim <= 128


def long_tile(capability: tuple[int, int] | None, itemsize: int, key_dim: int, value_dim: int) -> LongTile:
    """For a device (None: the interpreter), bytes of an element, and head dims. Raises ValueError for other head dims than HEAD_DIMS."""
    _check(key_dim, value_dim)
    _fits(capability, itemsize, key_dim)
    found = LONG if _hopper(capability, itemsize, key_dim) else ELSEWHERE[0]
    return replace(found, bv=min(found.bv, value_dim))


def single_tile(capability: tuple[int, int] | None, itemsize: int, key_dim: int, value_dim: int, num_rows: int) -> SingleTile:
    """As `long_tile`, for a launch that is made for so many rows."""
    _check(key_dim, value_dim)
    found = next(tile for least, tile in SINGLES if max(num_rows, 1) >= least) if _hopper(capability, itemsize, key_dim) else ELSEWHERE[1]
    return replace(found, bv=min(found.bv, value_dim), bk=min(found.bk, key_dim), second_bv=min(found.second_bv, value_dim))


def commit_tile(capability: tuple[int, int] | None, itemsize: int, key_dim: int, value_dim: int) -> CommitTile:
    """As `long_tile`."""
    _check(key_dim, value_dim)
    found = COMMIT if _hopper(capability, itemsize, key_dim) else ELSEWHERE[2]
    return replace(found, bv=min(found.bv, value_dim), bk=min(found.bk, key_dim))
