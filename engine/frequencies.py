"""Frequencies of rotary position embedding: default, linear and yarn, as formulas of a RopeConfig. No angles, no table: those are each engine's.

The order of the operations is transformers', so that in fp32 the frequencies have the same bits; `wide` is float32, or float64 in a float64 model.
"""

from __future__ import annotations

import math

import torch

from twinfer.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, wide: torch.dtype) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dims, [head_dim / 2] in `wide` on the CPU, and the factor that multiplies cos and sin."""
    exponent = torch.arange(0, head_dim, 2).to(wide) / head_dim  # [head_dim / 2], 0 .. just below 1
    inv_freq = 1.0 / (rope.theta**exponent)  # [head_dim / 2]
    if rope.kind == "default":
        return inv_freq, 1.0
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponent), _yarn_attention_factor(rope)
    raise ValueError(f"rope kind {rope.kind!r}: must be default, linear or yarn")


def _yarn(rope: RopeConfig, head_dim: int, wavelength: torch.Tensor) -> torch.Tensor:
    """Yarn: pairs that turn often keep their frequency, pairs that turn seldom are slowed by `factor`, a ramp blends between. [head_dim / 2].

    wavelength [head_dim / 2]: positions per radian. A pair that turns n times within the original context sits at index `pair_of(n)`.
    """
    if rope.original_max_position is None:
        raise ValueError("yarn needs the original context length")
    original = rope.original_max_position

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by 0
    pairs = torch.arange(head_dim // 2, dtype=wavelength.dtype)  # [head_dim / 2]
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)  # [head_dim / 2], 1: as trained, 0: slowed
    trained = 1.0 / wavelength  # [head_dim / 2]
    slowed = 1.0 / (rope.factor * wavelength)  # [head_dim / 2]
    return slowed * (1 - kept) + trained * kept


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Stated, or from the two mscales when both are given, or from `factor` alone."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
