"""Guarded copies of tensors: NaN (or the lowest integer) before, after and between, which no kernel may touch or read into a result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import ClassVar

import torch

ZONE = 256  # elements on either side, a head of the widest; keeps 16-byte alignment in every dtype
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where tensors are equal to the bit, NaN included."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


class Guarded:
    """`tensor` is a copy of `source` inside a larger buffer; `intact()` says whether all the rest of the buffer is as it was.

    gaps: entries of poison behind each dim of `source`. On the first dim they are rows that nobody uses; on others the strides grow. None: contiguous.
    Each buffer has a NaN of its own, so that another one's NaN, read there and written here, is seen.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, source: torch.Tensor, gaps: Sequence[int] = ()) -> None:
        # a permuted tensor keeps its order in memory
        order = sorted(range(source.dim()), key=lambda i: -source.stride(i))
        packed = source.permute(order)
        room = [packed.shape[place] + (gaps[i] if gaps else 0) for place, i in enumerate(order)]
        self._buffer = torch.zeros(prod(room) + 2 * ZONE, dtype=source.dtype, device=source.device)
        if source.dtype.is_floating_point:
            self._poison = int(bits(torch.tensor(torch.nan, dtype=source.dtype))) + 1 + next(self._numbers) % 60  # bf16 has 6 bits for it
        else:
            self._poison = torch.iinfo(source.dtype).min
        bits(self._buffer).fill_(self._poison)
        self._outside = torch.ones_like(self._buffer, dtype=torch.bool)
        own = tuple(slice(size) for size in packed.shape)
        inner, outside = (whole[ZONE : len(whole) - ZONE].view(room)[own] for whole in (self._buffer, self._outside))
        inner.copy_(packed)
        outside.fill_(False)
        back = [order.index(i) for i in range(source.dim())]
        self.tensor = inner.permute(back)

    def intact(self) -> bool:
        """Whether everything outside of the tensor still holds nothing but poison."""
        return bool((bits(self._buffer)[self._outside] == self._poison).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))
