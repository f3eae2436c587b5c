"""Bias, penalties and filters against transformers' processors of the same names, and at the edges where the two differ; draws nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.budget import examples, repeatable
from twinfer.reference.sampler import apply_bias, apply_mask, kept_tokens, penalise

from .columns import make_columns

SETTINGS = settings(max_examples=examples(100), deadline=None, derandomize=repeatable())
TOP_P = st.sampled_from([1e-6, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0])
MIN_P = st.sampled_from([0.0, 1e-4, 0.02, 0.1, 0.5, 1.0])


def random_logits(seed: int, size: int, spread: float) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def kept_by_transformers(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """In the order in which transformers' generate applies its warpers, off ones left out as it does."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])
    return set(scores[0].isfinite().nonzero().flatten().tolist())


@SETTINGS
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 80),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=TOP_P,
    min_p=MIN_P,
)
def test_kept_set_equals_transformers(seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(seed, size, spread)
    kept = kept_tokens(logits / temperature, top_k, top_p, min_p)
    assert set(kept.tolist()) == kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    assert logits[kept].tolist() == sorted(logits[kept].tolist(), reverse=True)


@SETTINGS
@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=30), top_k=st.integers(1, 35))
def test_top_k_keeps_exactly_k_and_of_a_tie_the_lower_ids(values: list[int], top_k: int) -> None:
    """The documented difference: transformers keeps every token that ties with the k-th."""
    logits = torch.tensor(values, dtype=torch.float64)
    kept = kept_tokens(logits, top_k, 1.0, 0.0).tolist()
    assert kept == sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]
    theirs = kept_by_transformers(logits, 1.0, top_k, 1.0, 0.0)
    assert set(kept) <= theirs
    edge = values[kept[-1]]
    assert all(values[i] == edge for i in theirs - set(kept))


@SETTINGS
@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=30), top_p=TOP_P)
def test_top_p_keeps_the_smallest_set_that_reaches_p(values: list[int], top_p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    kept = kept_tokens(logits, 0, top_p, 0.0).tolist()
    assert kept == sorted(range(len(values)), key=lambda i: (-values[i], i))[: len(kept)]
    probability = logits.softmax(0)
    assert len(kept) >= 1
    assert float(probability[kept].sum()) >= top_p - 1e-12
    assert float(probability[kept[:-1]].sum()) < top_p + 1e-12


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.75, [0, 1, 2]), (0.76, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_edge_is_exact_where_sums_are_exact(top_p: float, kept: list[int]) -> None:
    assert kept_tokens(torch.zeros(4, dtype=torch.float64), 0, top_p, 0.0).tolist() == kept


def test_the_best_token_passes_the_strictest_filters_together() -> None:
    hot = torch.full((50,), -torch.inf, dtype=torch.float64)
    hot[17] = 3.0
    for logits, best in ((hot, 17), (torch.zeros(50, dtype=torch.float64), 0), (random_logits(1, 50, 1e4), None)):
        kept = kept_tokens(logits, 1, 1e-9, 1.0).tolist()
        assert kept == [best if best is not None else int(logits.argmax())]


def test_top_p_counts_the_probabilities_that_top_k_leaves() -> None:
    """Of four equal tokens top-k 2 leaves halves, so p = 0.5 is reached by one of them."""
    assert kept_tokens(torch.zeros(4, dtype=torch.float64), 2, 0.5, 0.0).tolist() == [0]


@SETTINGS
@given(seed=st.integers(0, 10**6), penalty=st.sampled_from([0.5, 1.0, 1.3, 5.0]), seen=st.sets(st.integers(0, 19)))
def test_repetition_penalty_equals_transformers(seed: int, penalty: float, seen: set[int]) -> None:
    logits = random_logits(seed, 20, 3.0)
    sampling = make_columns(repetition=penalty, seen=[{token: token % 3 for token in seen}])
    ours = penalise(logits, 0, sampling)
    theirs = logits
    if seen:
        ids = torch.tensor([sorted(seen)])
        theirs = RepetitionPenaltyLogitsProcessor(float(np.float32(penalty)))(ids, logits[None].clone())[0]
    assert torch.allclose(ours, theirs, rtol=1e-15, atol=0)


def test_frequency_and_presence_count_the_output_only() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    sampling = make_columns(frequency=0.25, presence=0.5, seen=[{0: 0, 1: 1, 3: 4}])
    assert penalise(logits, 0, sampling).tolist() == [1.0, 0.25, 1.0, -2.5]


def test_repetition_comes_before_frequency_and_presence() -> None:
    logits = torch.tensor([2.0, -2.0], dtype=torch.float64)
    sampling = make_columns(repetition=2.0, frequency=0.25, presence=0.5, seen=[{0: 2, 1: 2}])
    assert penalise(logits, 0, sampling).tolist() == [2.0 / 2 - 1.0, -2.0 * 2 - 1.0]


@SETTINGS
@given(seed=st.integers(0, 10**6), bias=st.dictionaries(st.integers(0, 19), st.sampled_from([-5.0, 0.5, 100.0])))
def test_logit_bias_equals_transformers(seed: int, bias: dict[int, float]) -> None:
    logits = random_logits(seed, 20, 3.0)
    ours = apply_bias(logits, 0, make_columns(bias=[bias]))
    theirs = logits
    if bias:
        processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
        theirs = processor(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0]
    assert torch.equal(ours, theirs.double())


@SETTINGS
@given(size=st.integers(1, 100), extra=st.integers(0, 2), allowed=st.sets(st.integers(0, 99)))
def test_mask_bans_the_tokens_without_a_bit(size: int, extra: int, allowed: set[int]) -> None:
    words = np.zeros(-(-size // 32) + extra, np.uint32)
    for token in allowed:
        if token // 32 < len(words):
            words[token // 32] |= np.uint32(1 << (token % 32))
    masked = apply_mask(torch.zeros(size, dtype=torch.float64), words)
    assert [i for i in range(size) if masked[i] == 0] == sorted(t for t in allowed if t < size)
    assert all(masked[i] == -torch.inf for i in range(size) if i not in allowed)


def test_inputs_are_not_changed() -> None:
    logits = random_logits(3, 20, 3.0)
    before = logits.clone()
    sampling = make_columns(repetition=2.0, presence=1.0, bias=[{1: -np.inf}], seen=[{0: 2, 1: 2}])
    apply_mask(penalise(apply_bias(logits, 0, sampling), 0, sampling), np.array([5], np.uint32))
    kept_tokens(logits, 3, 0.5, 0.1)
    assert torch.equal(logits, before)
