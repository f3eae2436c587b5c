"""Philox and one draw in Python's own integers and floats: the oracle of the tensor forms, written apart from them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def plain_philox(counter: list[int], key: list[int], bits: int) -> list[int]:
    """Philox4xW-10 in Python's integers for words of 32 or 64 bits; the two widths differ only in their constants."""
    multipliers, steps = {
        32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
        64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
    }[bits]
    low = 2**bits - 1
    for round_number in range(10):
        keys = [(key[i] + round_number * steps[i]) & low for i in range(2)]
        products = [multipliers[0] * counter[0], multipliers[1] * counter[2]]
        counter = [
            (products[1] >> bits) ^ counter[1] ^ keys[0],
            products[1] & low,
            (products[0] >> bits) ^ counter[3] ^ keys[1],
            products[0] & low,
        ]
    return counter


def plain_draw(logits: Sequence[float], temperature: float, seed: int, sample: int, position: int, purpose: int = 0) -> int:
    """The token that an unfiltered draw gives."""
    best, best_score = -1, -math.inf
    for token, logit in enumerate(logits):
        word = plain_philox([token // 4, position, sample, purpose], [seed % 2**32, seed // 2**32], 32)[token % 4]
        uniform = min((word + 0.5) / 2**32, 1 - 2**-24)
        score = logit / temperature - math.log(-math.log1p(-uniform))
        if score > best_score:
            best, best_score = token, score
    return best
