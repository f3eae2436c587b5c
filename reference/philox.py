"""Philox4x32-10 and the noise made from it, in int64 and fp64 tensors. It keeps no state: twinfer.noise has the keying."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinfer.limits import ceil_div
from twinfer.noise import LARGEST_UNIFORM, PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, WORDS_PER_BLOCK, Purpose

IntArray = NDArray[np.int32] | NDArray[np.int64]
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four output words for each counter. All words are int64 tensors with values from 0 to 2^32 - 1, of shapes that broadcast to one."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(PHILOX_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & _LOW, (k1 + PHILOX_KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * word. In halves of 16 bits, because the product itself may exceed int64."""
    by_low = factor * (word & 0xFFFF)
    by_high = factor * (word >> 16) + (by_low >> 16)
    return by_high >> 16, ((by_high & 0xFFFF) << 16) | (by_low & 0xFFFF)


def uniform_words(
    seed: NDArray[np.uint64], sample: IntArray, position: IntArray, purpose: Purpose, num_words: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Words of token ids 0 .. num_words - 1 for each of n (seed, sample, position), [n, num_words] int64 with values from 0 to 2^32 - 1."""
    block = torch.arange(ceil_div(num_words, WORDS_PER_BLOCK), device=device)[None, :]

    def column(values: IntArray | NDArray[np.uint64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)[:, None]

    counter = (block, column(position), column(sample), torch.full_like(block, int(purpose)))
    words = philox(counter, (column(seed & np.uint64(_LOW)), column(seed >> np.uint64(32))))
    return torch.stack(words, dim=2).flatten(1)[:, :num_words]


def exponential_noise(words: Tensor) -> Tensor:
    """Standard exponential noise of each word, fp64, in words' shape; from 2^-33 to 16.64."""
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM)
    return -torch.log1p(-uniform)


def gumbel_noise(words: Tensor) -> Tensor:
    """Standard Gumbel noise of each word, fp64, in words' shape; from -2.82 to 22.88."""
    return -torch.log(exponential_noise(words))
