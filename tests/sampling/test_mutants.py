"""Faults put into the sampler on purpose, each of which a named check must turn red. The checks hold on the sampler as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twinfer.noise import Purpose
from twinfer.plan import SamplingColumns
from twinfer.reference import sampler
from twinfer.reference.philox import uniform_words

from .columns import make_columns
from .plain import plain_draw

COUNT = 48
Check = Callable[[], None]


def drawn(logits: Tensor, sampling: SamplingColumns, first: int = 0, purpose: Purpose = Purpose.DRAW) -> list[int]:
    """Tokens at COUNT positions from `first` on, all with the same logits, [vocabulary]."""
    rows = np.zeros(COUNT, np.int32)
    positions = np.arange(first, first + COUNT)
    tokens: list[int] = sampler.sample(logits.expand(COUNT, len(logits)), rows, positions, sampling, purpose=purpose).tokens.tolist()
    return tokens


def check_seed() -> None:
    assert drawn(torch.zeros(32), make_columns(seed=1)) != drawn(torch.zeros(32), make_columns(seed=2))


def check_high_seed_word() -> None:
    assert drawn(torch.zeros(32), make_columns(seed=1)) != drawn(torch.zeros(32), make_columns(seed=1 + 2**32))


def check_position() -> None:
    assert drawn(torch.zeros(32), make_columns(seed=1)) != drawn(torch.zeros(32), make_columns(seed=1), first=COUNT)


def check_sample_index() -> None:
    assert drawn(torch.zeros(32), make_columns(seed=1)) != drawn(torch.zeros(32), make_columns(seed=1, sample=1))


def check_purpose() -> None:
    assert drawn(torch.zeros(32), make_columns(seed=1)) != drawn(torch.zeros(32), make_columns(seed=1), purpose=Purpose.ACCEPT)


def check_plain_draw() -> None:
    want = [plain_draw([0.0, 1.0, -1.0, 0.5, 0.25], 0.5, 1, 0, position) for position in range(COUNT)]
    assert drawn(torch.tensor([0.0, 1.0, -1.0, 0.5, 0.25]), make_columns(seed=1, temperature=0.5)) == want


def check_top_p_edge() -> None:
    """Four equal tokens, so sums of probabilities are exact: half of the mass is two tokens."""
    assert set(drawn(torch.zeros(4), make_columns(top_p=0.5))) == {0, 1}
    assert set(drawn(torch.zeros(4), make_columns(top_p=0.625))) == {0, 1, 2}


def check_top_k_tie() -> None:
    assert set(drawn(torch.zeros(4), make_columns(top_k=3))) == {0, 1, 2}


def check_penalty_counts_output_only() -> None:
    """Token 0 was in the prompt and stays the best; token 1 was in the output and loses."""
    sampling = make_columns(temperature=0.0, presence=1.0, frequency=1.0, seen=[{0: 0, 1: 1}])
    assert set(drawn(torch.tensor([1.0, 1.5, 0.0]), sampling)) == {0}


def check_greedy_tie() -> None:
    assert set(drawn(torch.tensor([0.0, 2.0, 2.0]), make_columns(temperature=0.0))) == {1}


def check_ban() -> None:
    assert set(drawn(torch.tensor([9.0, 0.0, 0.0]), make_columns(bias=[{0: -np.inf}]))) == {1, 2}


def with_words(**fixed: Any) -> Callable[..., Tensor]:
    """uniform_words with some arguments replaced by a constant."""

    def words(seed: Any, sample: Any, position: Any, purpose: Purpose, num_words: int, device: Any) -> Tensor:
        arguments = {"seed": seed, "sample": sample, "position": position}
        for name, value in fixed.items():
            if name in arguments:
                arguments[name] = np.full_like(arguments[name], value)
        return uniform_words(**arguments, purpose=fixed.get("purpose", purpose), num_words=num_words, device=device)

    return words


def low_word_of_seed_only(seed: Any, *rest: Any) -> Tensor:
    return uniform_words(seed & np.uint64(2**32 - 1), *rest)


def words_in_another_order(*arguments: Any) -> Tensor:
    return uniform_words(*arguments).flip(1)


def top_p_includes_one_more(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    ranked, order = scores.sort(descending=True, stable=True)
    before = ranked.softmax(0).cumsum(0) - ranked.softmax(0)
    return order[before <= top_p]


def top_p_stops_one_early(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    ranked, order = scores.sort(descending=True, stable=True)
    return order[: max(1, int((ranked.softmax(0).cumsum(0) <= top_p).sum()))]


def top_k_keeps_ties(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    edge = scores.sort(descending=True).values[top_k - 1]
    return (scores >= edge).nonzero().flatten()


def penalty_on_the_prompt_too(scores: Tensor, row: int, sampling: SamplingColumns) -> Tensor:
    ids = torch.from_numpy(sampling.seen_ids.astype(np.int64))
    count = torch.from_numpy(sampling.seen_counts.astype(np.float64)) + 1
    return scores.index_add(0, ids, -float(sampling.frequency[row]) * count - float(sampling.presence[row]))


def last_argmax(scores: Tensor) -> int:
    return int((scores == scores.max()).nonzero()[-1])


def no_bias(scores: Tensor, row: int, sampling: SamplingColumns) -> Tensor:
    return scores


# What is replaced in the sampler, by what, and the check that must fail.
MUTANTS: dict[str, tuple[str, Callable[..., Any], Check]] = {
    "ignores the seed": ("uniform_words", with_words(seed=0), check_seed),
    "ignores the seed's high word": ("uniform_words", low_word_of_seed_only, check_high_seed_word),
    "ignores the position": ("uniform_words", with_words(position=0), check_position),
    "ignores the sample index": ("uniform_words", with_words(sample=0), check_sample_index),
    "ignores the purpose": ("uniform_words", with_words(purpose=Purpose.DRAW), check_purpose),
    "deals the words to other tokens": ("uniform_words", words_in_another_order, check_plain_draw),
    "top-p keeps one too many": ("kept_tokens", top_p_includes_one_more, check_top_p_edge),
    "top-p keeps one too few": ("kept_tokens", top_p_stops_one_early, check_top_p_edge),
    "top-k keeps every tie": ("kept_tokens", top_k_keeps_ties, check_top_k_tie),
    "penalises what only the prompt has": ("penalise", penalty_on_the_prompt_too, check_penalty_counts_output_only),
    "breaks a tie by the highest index": ("first_argmax", last_argmax, check_greedy_tie),
    "drops the logit bias": ("apply_bias", no_bias, check_ban),
}
CHECKS = {mutant[2].__name__: mutant[2] for mutant in MUTANTS.values()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_check_holds(check: Check) -> None:
    check()


@pytest.mark.parametrize(("name", "mutant", "check"), MUTANTS.values(), ids=MUTANTS.keys())
def test_mutant_is_caught(name: str, mutant: Callable[..., Any], check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, name, mutant)
    with pytest.raises(AssertionError):
        check()
