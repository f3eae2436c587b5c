"""Tile sizes of paged attention by device, and the two numbers of its arithmetic. No torch, no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinfer.invariants.symbols import ATTENTION_KEYS, ATTENTION_SPLIT

BN = ATTENTION_KEYS  # keys of a tile. Arithmetic: another value gives other bits
SPLIT = ATTENTION_SPLIT  # keys of a split, from position 0. Arithmetic too; bounds count splits, so the number stands there

HEAD_DIMS = (64, 128, 256)
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))  # devices that the table is checked for
KIB = 1024
# Shared memory that one block may have, by compute capability (CUDA programming guide); what is not listed is taken to be as small as the smallest.
SHARED = {(8, 0): 163 * KIB, (8, 7): 163 * KIB, (9, 0): 227 * KIB, (10, 0): 227 * KIB, (10, 3): 227 * KIB}
SMALLEST_SHARED = 99 * KIB  # 8.6, 8.9, 12.0


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: (token, query head of one kv head) places of a program. Neither it nor warps and stages shows in the bits."""

    rows: int
    warps: int
    stages: int


# (spread, bytes of an element, head_dim). H200, d 128 in bf16: the fastest of bench/probes (RESULTS.md). The rest takes their form: as deep as leaves two
# or three blocks a multiprocessor in SPREAD; 8 warps where two accumulators do not fit the registers of 4 (compiled: 104 bytes spill
# for d 256 in SERIAL, less elsewhere). Not timed: d 64 and 256, fp16, fp32.
HOPPER: dict[tuple[bool, int, int], Tile] = {
    (True, 2, 64): Tile(16, 4, 3),
    (True, 2, 128): Tile(16, 4, 3),
    (True, 2, 256): Tile(16, 4, 2),
    (False, 2, 64): Tile(64, 4, 3),
    (False, 2, 128): Tile(64, 4, 3),
    (False, 2, 256): Tile(64, 8, 2),
    (True, 4, 64): Tile(16, 4, 2),
    (True, 4, 128): Tile(16, 8, 2),
    (True, 4, 256): Tile(16, 8, 2),
    (False, 4, 64): Tile(32, 8, 2),
    (False, 4, 128): Tile(32, 8, 2),
    (False, 4, 256): Tile(16, 8, 2),
}
# Every other device, from compute capability 8.0: it fits the smallest of them. 32 rows, so that no device's own matrix unit for 64 is asked for.
# Compiled for each of them, run on none.
ELSEWHERE: dict[tuple[bool, int, int], Tile] = {
    (True, 2, 64): Tile(16, 4, 3),
    (True, 2, 128): Tile(16, 4, 2),
    (True, 2, 256): Tile(16, 4, 2),
    (False, 2, 64): Tile(32, 4, 2),
    (False, 2, 128): Tile(32, 4, 2),
    (False, 2, 256): Tile(32, 8, 2),
    (True, 4, 64): Tile(16, 4, 2),
    (True, 4, 128): Tile(16, 8, 2),
    (True, 4, 256): Tile(16, 8, 1),
    (False, 4, 64): Tile(32, 8, 2),
    (False, 4, 128): Tile(32, 8, 2),
    (False, 4, 256): Tile(16, 8, 1),
}


# SERIAL over rows of one token, (least number of rows, tile), d 128 in bf16. H200, 8 kv heads, group 2 and 4, contexts of 200 to 2200 (bench/probes
# RESULTS.md, "Decode tiles"): all tiles gave the same bits; 16x64 with 2 warps and 2 stages reads keys at 4.2 TB/s from 64 rows on.
DECODE: tuple[tuple[int, Tile], ...] = ((48, Tile(16, 2, 2)), (1, Tile(16, 4, 3)))


def decode_tile(capability: tuple[int, int], dtype: str, head_dim: int, group: int, num_rows: int) -> Tile:
    """The SERIAL tile of a launch over `num_rows` >= 1 rows of one or a few tokens. Raises ValueError as `tile` does."""
    found = tile(capability, False, dtype, head_dim, group)
    if capability != (9, 0) or head_dim != 128 or ITEMSIZE[dtype] != 2:
        return found
    own = next(own for least, own in DECODE if num_rows >= least)
    return replace(own, rows=max(own.rows, padded_group(group)))


def padded_group(group: int) -> int:
    """Places that the query heads of one kv head take: the next power of two."""
    return 1 << (group - 1).bit_length()


def tile_tokens(tile: Tile, group: int) -> int:
    """Tokens of a tile; 0 where a group does not fit."""
    return tile.rows // padded_group(group)


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one block may have on a device."""
    return SHARED.get(capability, SMALLEST_SHARED)


def shared_bound(tile: Tile, capability: tuple[int, int], itemsize: int, head_dim: int) -> int:
    """At least the bytes of shared memory of one block: buffers of keys and values, q, p, and scratch of 512 bytes a warp.

    A Hopper matrix unit reads operands where they were loaded, so that a tile stays until it is used: a buffer a stage. Elsewhere they pass through
    registers and one buffer fewer is in flight; one stage loads through registers, and keys and values take turns in one buffer. Found by compiling
    with Triton 3.7.1.
    """
    keys = BN * head_dim * itemsize
    wgmma = capability == (9, 0) and tile.rows >= 64 and itemsize == 2
    buffers = 2 * tile.stages if wgmma else max(1, 2 * (tile.stages - 1))
    return buffers * keys + tile.rows * (head_dim + BN) * itemsize + 512 * tile.warps


def tile(capability: tuple[int, int], spread: bool, dtype: str, head_dim: int, group: int) -> Tile:
    """The tile for a device; rows are raised to the group. Raises ValueError where there is none, with the reason."""
    if capability < (8, 0):
        raise ValueError(f"attention needs compute capability 8.0 or more, not {capability[0]}.{capability[1]}")
    if head_dim not in HEAD_DIMS or dtype not in ITEMSIZE:
        raise ValueError(f"attention has no tile for head_dim {head_dim} in {dtype}: head_dim is one of {HEAD_DIMS}, dtype one of {tuple(ITEMSIZE)}")
    table = HOPPER if capability == (9, 0) else ELSEWHERE
    found = table[spread, ITEMSIZE[dtype], head_dim]
    found = replace(found, rows=max(found.rows, padded_group(group)))
    need, limit = shared_bound(found, capability, ITEMSIZE[dtype], head_dim), shared_limit(capability)
    if need > limit:
        raise ValueError(f"attention: a group of {group} query heads of {head_dim} in {dtype} needs {need} bytes of shared memory a block, {limit} exist")
    return found
