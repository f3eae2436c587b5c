"""Law 2 on the reference: whatever the schedule, a request's logits are those of its solo run, to 1e-9 in fp64 and 1e-4 nat in fp32.

Chunks, mixed steps, prefix hits at every page, preemption, cache on and off; greedy and seeded tokens are equal in fp64. Micro model.
"""

from __future__ import annotations

import random
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.budget import examples, repeatable
from twinfer.limits import ceil_div
from twinfer.reference import Engine
from twinfer.request import Event, Request
from twinfer.sampling import SamplingParams

from .recorder import DEVICE, F64, GOLDEN, Recorder, log_softmax

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
MAX_NEW = 6
SHARED = tuple(b"To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer")
PROMPTS = (*(SHARED[:n] + tail for n in (17, 32, 33, 48, 64, 80) for tail in ((33,), (44, 45))), (10,), SHARED, (10, 11, 12), SHARED[:16], SHARED[:48])


def params(prompt: int) -> SamplingParams:
    """Every third request greedy, the others seeded with filters; stable for a prompt."""
    if prompt % 3 == 0:
        return SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True)
    return SamplingParams(temperature=0.9, top_p=0.95, top_k=50 * (prompt % 2), seed=prompt, max_tokens=MAX_NEW, ignore_eos=True)


def run(dtype: str, order: tuple[int, ...], prefix_cache: bool, **limits: int) -> tuple[Engine, Recorder, dict[int, list[int]]]:
    """Runs the prompts numbered in `order`, all queued at once. Returns tokens by place in `order` (= sequence id, as n is 1)."""
    values = {"max_context": 96, "page_size": 16, **limits}
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype=dtype, limits=values, prefix_cache=prefix_cache, audit="full", device=DEVICE)
    recorder = Recorder(engine)
    for i in order:
        engine.add(Request(PROMPTS[i], params(i)))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(order))}
    while engine.has_work:
        event: Event
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0
    return engine, recorder, tokens


@cache
def solo(dtype: str, prompt: int) -> tuple[F64, tuple[int, ...]]:
    """Log probabilities at every position and the tokens of the prompt alone, whole, without a cache."""
    _, recorder, tokens = run(dtype, (prompt,), False, max_batch=1, max_step_tokens=96, max_chunk_tokens=96, num_pages=6)
    return log_softmax(recorder.of(0)), tuple(tokens[0])


def check(dtype: str, order: tuple[int, ...], recorder: Recorder, tokens: dict[int, list[int]]) -> int:
    """Compares every computed logit with the solo run's; returns how many positions were compared."""
    compared = 0
    for place, prompt in enumerate(order):
        expected, expected_tokens = solo(dtype, prompt)
        if dtype == "float64":
            assert tuple(tokens[place]) == expected_tokens, f"prompt {prompt}"
        same = len(PROMPTS[prompt]) + (MAX_NEW if dtype == "float64" else 0)  # in fp32 a near tie may part the tokens, so prompts only
        for position, versions in recorder.logits[place].items():
            if position < min(same, len(expected)):
                for logits in versions:
                    assert np.abs(log_softmax(logits) - expected[position]).max() <= TOLERANCE[dtype], f"prompt {prompt} position {position}"
                    compared += 1
    assert compared > 0
    return compared


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, int]:
    max_batch = draw(st.integers(1, 6))
    max_step_tokens = draw(st.integers(max_batch, 130))
    page_size = draw(st.sampled_from([1, 4, 16, 32]))
    one = ceil_div(96, page_size)
    return {
        "max_batch": max_batch,
        "max_step_tokens": max_step_tokens,
        "max_chunk_tokens": draw(st.integers(min(5, max_step_tokens), max_step_tokens)),
        "page_size": page_size,
        "num_pages": draw(st.integers(one, 2 * one)),
        "max_logit_tokens": draw(st.integers(1, 8)),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_schedule_gives_the_solo_logits(dtype: str) -> None:
    reached = {"preempted": 0, "hit": 0, "mixed": 0, "chunked": 0}

    @given(limits=schedules(), seed=st.integers(0, 10**6), prefix_cache=st.sampled_from([True, True, False]))
    @settings(max_examples=examples(25), deadline=None, derandomize=repeatable(), database=None, suppress_health_check=list(HealthCheck))
    def gate(limits: dict[str, int], seed: int, prefix_cache: bool) -> None:
        order = tuple(random.Random(seed).choices(range(len(PROMPTS)), k=8))
        engine, recorder, tokens = run(dtype, order, prefix_cache, **limits)
        check(dtype, order, recorder, tokens)
        reached["preempted"] += engine.scheduler.num_preemptions
        reached["hit"] += engine.scheduler.num_prefix_hits
        reached["mixed"] += sum(bool((p.length == 1).any() and (p.length > 1).any()) for p in recorder.plans)
        reached["chunked"] += sum(bool((p.num_samples == 0).any()) for p in recorder.plans)

    gate()
    assert all(reached.values()), f"states never reached: {reached}"


def test_a_hit_at_every_page() -> None:
    """A warm prompt, then every prefix of it cut at each page and one token around it: the hit's length is exact and the logits are the solo run's."""
    for page_size in (1, 16):
        limits = {"max_batch": 1, "max_step_tokens": 96, "page_size": page_size, "num_pages": 96 // page_size + 6}
        engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits={"max_context": 96, **limits}, audit="full", device=DEVICE)
        greedy = SamplingParams(temperature=0.0, max_tokens=1)
        engine.generate([list(SHARED)], greedy)
        recorder = Recorder(engine)
        whole = log_softmax(solo_logits(SHARED))
        for length in sorted({n for k in range(page_size, len(SHARED), page_size) for n in (k, k + 1)}):
            (result,) = engine.generate([list(SHARED[:length])], greedy)
            assert result.num_cached_tokens == (length - 1) // page_size * page_size
            rows = recorder.logits[max(recorder.logits)]
            assert sorted(rows) == list(range(result.num_cached_tokens, length))
            for position, (logits,) in rows.items():
                assert np.abs(log_softmax(logits) - whole[position]).max() <= 1e-9


def solo_logits(prompt: tuple[int, ...]) -> F64:
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits={"max_context": 96, "max_batch": 1}, prefix_cache=False, device=DEVICE)
    recorder = Recorder(engine)
    engine.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=1))
    return recorder.of(0)
