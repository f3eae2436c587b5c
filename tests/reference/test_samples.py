"""Seeded samples with penalties are the same whatever the schedule: batch mates, chunks, prefix hits, pools so tight that samples are preempted. fp64."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.budget import examples, repeatable
from twinfer.limits import ceil_div
from twinfer.reference import Engine
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .recorder import DEVICE, GOLDEN

MAX_NEW = 10
MAX_CONTEXT = 64
TEXT = tuple(b"It was the nightingale, and not the lark, that")
Samples = tuple[tuple[int, ...], ...]

REQUESTS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    (TEXT[:33], {"n": 4, "temperature": 1.0, "repetition_penalty": 1.3}),
    (TEXT[:33], {"n": 2, "temperature": 1.25, "presence_penalty": 0.7, "frequency_penalty": 0.4, "top_k": 30}),
    (TEXT[:16], {"n": 3, "temperature": 0.8, "frequency_penalty": 0.9, "logit_bias": {32: -2.0, 101: 1.5}}),
    (TEXT, {"n": 2, "temperature": 1.5, "repetition_penalty": 1.1, "presence_penalty": -0.5, "top_p": 0.9}),
    (TEXT[:17], {"n": 1, "temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.25}),
    (TEXT[:5], {"n": 2, "temperature": 1.0, "min_p": 0.02, "min_tokens": 4, "logit_bias": {255: 12.0}}),
)


def request(index: int) -> Request:
    prompt, values = REQUESTS[index]
    return Request(prompt, SamplingParams(**{"max_tokens": MAX_NEW, "ignore_eos": index != 5, "seed": 100 + index, **values}))


def run(order: tuple[int, ...], prefix_cache: bool, arrivals: int = 100, **limits: int) -> tuple[Engine, dict[int, list[list[int]]]]:
    """Requests numbered in `order`, `arrivals` more of them before each step: tokens by place in `order` and sample."""
    values = {"max_context": MAX_CONTEXT, **limits}
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits=values, prefix_cache=prefix_cache, audit="full", device=DEVICE)
    tokens: dict[int, list[list[int]]] = {}
    left = list(order)
    while left or engine.has_work:
        for index in left[:arrivals]:
            tokens[engine.add(request(index))] = [[] for _ in range(request(index).params.n)]
        del left[:arrivals]
        for event in engine.step():
            tokens[event.request_id][event.sample] += event.tokens
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0
    return engine, tokens


@cache
def solo(index: int) -> Samples:
    """The samples of one request that has the engine to itself: one row at a time, whole prompt, no cache."""
    _, tokens = run((index,), False, max_batch=1, max_step_tokens=64, max_chunk_tokens=64, page_size=16, num_pages=4)
    return tuple(tuple(sample) for sample in tokens[0])


def test_samples_differ_and_penalties_matter() -> None:
    for index in range(len(REQUESTS)):
        assert len(set(solo(index))) == REQUESTS[index][1]["n"], "two samples are equal"
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits={"max_context": MAX_CONTEXT, "max_batch": 6}, device=DEVICE)
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for index in range(5):
        params = dataclasses.replace(request(index).params, **off)
        (result,) = engine.generate([Request(request(index).prompt, params)])
        assert tuple(completion.tokens for completion in result.completions) != solo(index), f"the penalties of request {index} change no token"
    assert any(len(sample) < MAX_NEW for sample in solo(5)), "no sample of the last request ends by itself"


@pytest.mark.parametrize("index", range(4))
def test_a_sample_is_the_same_alone_and_among_many(index: int) -> None:
    """Sample i of n is what it would be with another n: its noise is keyed by its own number."""
    prompt, values = REQUESTS[index]
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits={"max_context": MAX_CONTEXT, "max_batch": 6}, audit="full", device=DEVICE)
    more = SamplingParams(**{**values, "n": 5, "max_tokens": MAX_NEW, "ignore_eos": True, "seed": 100 + index})
    (result,) = engine.generate([Request(prompt, more)])
    assert tuple(completion.tokens for completion in result.completions)[: len(solo(index))] == solo(index)


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, int]:
    max_batch = draw(st.integers(1, 8))
    max_step_tokens = draw(st.integers(max_batch, 70))
    page_size = draw(st.sampled_from([1, 4, 16]))
    one = ceil_div(MAX_CONTEXT, page_size)
    return {
        "max_batch": max_batch,
        "max_step_tokens": max_step_tokens,
        "max_chunk_tokens": draw(st.integers(min(3, max_step_tokens), max_step_tokens)),
        "page_size": page_size,
        "num_pages": draw(st.integers(one, 2 * one)),
        "max_logit_tokens": draw(st.integers(1, 8)),
    }


def test_any_schedule_gives_the_solo_samples() -> None:
    reached: Counter[str] = Counter()

    @given(limits=schedules(), seed=st.integers(0, 10**6), prefix_cache=st.sampled_from([True, True, False]), arrivals=st.sampled_from([1, 2, 100]))
    @settings(max_examples=examples(11), deadline=None, derandomize=repeatable(), database=None, suppress_health_check=list(HealthCheck))
    def gate(limits: dict[str, int], seed: int, prefix_cache: bool, arrivals: int) -> None:
        order = tuple(random.Random(seed).choices(range(len(REQUESTS)), k=4))
        engine, tokens = run(order, prefix_cache, arrivals, **limits)
        for place, index in enumerate(order):
            assert tuple(tuple(sample) for sample in tokens[place]) == solo(index), f"request {index} at place {place} of {order}"
        reached["preempted"] += engine.scheduler.num_preemptions
        reached["hit"] += engine.scheduler.num_prefix_hits
        reached["batched"] += limits["max_batch"] > 4
        reached["chunked"] += limits["max_chunk_tokens"] < 33

    gate()
    missing = [state for state in ("preempted", "hit", "batched", "chunked") if not reached[state]]
    assert not missing, f"states never reached: {missing}; reached: {dict(reached)}"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_samples_go_on_where_they_were(prefix_cache: bool) -> None:
    """Every request at once in a pool of one context and a little: samples are thrown out in mid-output, with penalties that count what they wrote."""
    order = (0, 1, 3, 2)
    engine, tokens = run(order, prefix_cache, max_batch=8, max_step_tokens=40, max_chunk_tokens=16, page_size=4, num_pages=20)
    assert engine.scheduler.num_preemptions >= 4
    for place, index in enumerate(order):
        assert tuple(tuple(sample) for sample in tokens[place]) == solo(index), f"request {index}"
