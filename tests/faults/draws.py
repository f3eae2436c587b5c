"""One small check for each thing that a token drawn by the reference depends on, by the name of its gate. Not a test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.sampling.columns import make_columns
from tests.sampling.plain import plain_draw
from twinfer.noise import Purpose
from twinfer.plan import SamplingColumns
from twinfer.reference import sampler

COUNT = 48
EVEN = torch.zeros(32)


def drawn(logits: Tensor, sampling: SamplingColumns, first: int = 0, purpose: Purpose = Purpose.DRAW) -> list[int]:
    """Tokens at COUNT positions from `first` on, all with the same logits, [vocabulary]."""
    rows = np.zeros(COUNT, np.int32)
    positions = np.arange(first, first + COUNT)
    tokens: list[int] = sampler.sample(logits.expand(COUNT, len(logits)), rows, positions, sampling, purpose=purpose).tokens.tolist()
    return tokens


def seed() -> None:
    assert drawn(EVEN, make_columns(seed=1)) != drawn(EVEN, make_columns(seed=2))


def high_seed_word() -> None:
    assert drawn(EVEN, make_columns(seed=1)) != drawn(EVEN, make_columns(seed=1 + 2**32))


def position() -> None:
    assert drawn(EVEN, make_columns(seed=1)) != drawn(EVEN, make_columns(seed=1), first=COUNT)


def sample_index() -> None:
    assert drawn(EVEN, make_columns(seed=1)) != drawn(EVEN, make_columns(seed=1, sample=1))


def purpose() -> None:
    assert drawn(EVEN, make_columns(seed=1)) != drawn(EVEN, make_columns(seed=1), purpose=Purpose.ACCEPT)


def against_plain() -> None:
    want = [plain_draw([0.0, 1.0, -1.0, 0.5, 0.25], 0.5, 1, 0, place) for place in range(COUNT)]
    assert drawn(torch.tensor([0.0, 1.0, -1.0, 0.5, 0.25]), make_columns(seed=1, temperature=0.5)) == want


def top_p_edge() -> None:
    """Four equal tokens, so sums of probabilities are exact: half of the mass is two tokens."""
    assert set(drawn(torch.zeros(4), make_columns(top_p=0.5))) == {0, 1}
    assert set(drawn(torch.zeros(4), make_columns(top_p=0.625))) == {0, 1, 2}


def top_k_tie() -> None:
    assert set(drawn(torch.zeros(4), make_columns(top_k=3))) == {0, 1, 2}


def output_penalties() -> None:
    """Token 0 was in the prompt and stays the best; token 1 was in the output and loses."""
    sampling = make_columns(temperature=0.0, presence=1.0, frequency=1.0, seen=[{0: 0, 1: 1}])
    assert set(drawn(torch.tensor([1.0, 1.5, 0.0]), sampling)) == {0}


def greedy_tie() -> None:
    assert set(drawn(torch.tensor([0.0, 2.0, 2.0]), make_columns(temperature=0.0))) == {1}


def ban() -> None:
    assert set(drawn(torch.tensor([9.0, 0.0, 0.0]), make_columns(bias=[{0: -np.inf}]))) == {1, 2}


GATES: dict[str, Callable[[], None]] = {
    "seed": seed,
    "high seed word": high_seed_word,
    "position": position,
    "sample index": sample_index,
    "purpose": purpose,
    "plain draw": against_plain,
    "top-p edge": top_p_edge,
    "top-k tie": top_k_tie,
    "output penalties": output_penalties,
    "greedy tie": greedy_tie,
    "ban": ban,
}
