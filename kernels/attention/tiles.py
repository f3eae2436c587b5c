"""Tile sizes of paged attention by device, and the two numbers of its arithmetic. No torch, no kernel."""

from __future__ import annotations

from dataclasses import dataclass

BN = 64  # keys of a tile. Arithmetic: another value gives other bits
SPLIT = 256  # keys of a split, from position 0. Arithmetic too


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: (token, query head of one kv head) places of a program. Neither it nor warps and stages shows in the bits."""

    rows: int
    warps: int
    stages: int


def padded_group(group: int) -> int:
    """Places that the query heads of one kv head take: the next power of two."""
    return 1 << (group - 1).bit_length()


def tile_tokens(tile: Tile, group: int) -> int:
    """Tokens of a tile; 0 where a group does not fit."""
    return tile.rows // padded_group(group)
