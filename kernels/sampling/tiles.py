"""Tile sizes of the sampling kernels. Not their arithmetic: no result depends on a tile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens and warps of the programs that walk the vocabulary; all sizes are powers of two.

    chunk      tokens of one program, a multiple of 4 and of every block below
    block      tokens at a time in statistics, draw and probability sums
    digit      bits of a score that one level of a search reads: 4, 8 or 16
    digits     tokens at a time in a search, which keeps 2^digit int64 sums for each of them in registers
    sparse     entries at a time, and `sparse_programs` programs a position, of bias and penalties
    warps      of a program that walks a chunk; those that only combine chunks have one
    """

    chunk: int
    block: int
    digit: int
    digits: int
    sparse: int
    sparse_programs: int
    warps: int

    def __post_init__(self) -> None:
        sizes = (self.chunk, self.block, self.digits, self.sparse)
        if any(size < 4 or size & (size - 1) for size in sizes) or max(self.block, self.digits) > self.chunk or self.digit not in (4, 8, 16):
            raise ValueError(f"tiles must be powers of two, blocks no larger than the chunk, a digit 4, 8 or 16 bits: {self}")


# Reckoned, not yet measured on a GPU: 4096 tokens a program fill 38 multiprocessors at batch 1 and a vocabulary of 151936; 512 tokens of a search
# are 4 a thread of 4 warps, whose 16 int64 sums take 128 registers.
DEFAULT = Tiles(chunk=4096, block=1024, digit=4, digits=512, sparse=256, sparse_programs=4, warps=4)
