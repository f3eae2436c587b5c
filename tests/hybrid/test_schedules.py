"""Any schedule gives the solo logits: chunks, mixed steps, neighbours, preemption, few state slots. The later types on the reference, to 1e-9 in fp64.

A tiny model of each type with made-up weights; greedy and seeded tokens are equal. Prefix hits happen where a model keeps no state.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.budget import examples, repeatable
from tests.reference.recorder import F64, Recorder, log_softmax
from twinfer.errors import LimitError
from twinfer.limits import ceil_div
from twinfer.reference import Engine
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from .engines import VOCAB, open_engine, write_config
from .shapes import HYBRID, NEW

TOLERANCE = 1e-9  # logits near 8; found: below 1e-13
MAX_NEW, CONTEXT = 5, 96
SHARED = tuple(random.Random(8).choices(range(VOCAB), k=80))
PROMPTS = (*(SHARED[:n] + tail for n in (5, 16, 17, 40, 64, 66) for tail in ((33,), (44, 45))), (10,), SHARED, (10, 11, 12), SHARED[:32])
FOLDER = TemporaryDirectory()


def params(prompt: int) -> SamplingParams:
    """Every third request greedy, the others seeded with filters; stable for a prompt."""
    if prompt % 3 == 0:
        return SamplingParams(temperature=0.0, max_tokens=MAX_NEW)
    return SamplingParams(temperature=0.9, top_p=0.95, top_k=50 * (prompt % 2), seed=prompt, max_tokens=MAX_NEW)


@cache
def model(name: str) -> Path:
    return write_config(Path(FOLDER.name) / name, name)


def run(name: str, order: tuple[int, ...], **limits: int) -> tuple[Engine, Recorder, dict[int, list[int]]]:
    """Runs the prompts numbered in `order`, all queued at once. Tokens by place in `order`, which is the sequence's id too."""
    engine = open_engine(model(name), **limits)
    recorder = Recorder(engine)
    for i in order:
        engine.add(Request(PROMPTS[i], params(i)))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(order))}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.request_id] += event.tokens
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == engine.scheduler.states.num_held == 0
    return engine, recorder, tokens


@cache
def solo(name: str, prompt: int) -> tuple[F64, tuple[int, ...]]:
    """Log probabilities at every position and the tokens of the prompt alone, whole."""
    _, recorder, tokens = run(name, (prompt,), max_batch=1, max_step_tokens=CONTEXT, max_chunk_tokens=CONTEXT, num_pages=6)
    return log_softmax(recorder.of(0)), tuple(tokens[0])


def check(name: str, order: tuple[int, ...], recorder: Recorder, tokens: dict[int, list[int]]) -> None:
    for place, prompt in enumerate(order):
        expected, expected_tokens = solo(name, prompt)
        assert tuple(tokens[place]) == expected_tokens, f"prompt {prompt}"
        for position, versions in recorder.logits[place].items():
            for logits in versions:
                assert np.abs(log_softmax(logits) - expected[position]).max() <= TOLERANCE, f"prompt {prompt} position {position}"


@st.composite
def schedules(draw: st.DrawFn, has_states: bool) -> dict[str, int]:
    max_batch = draw(st.integers(1, 5))
    max_step_tokens = draw(st.integers(max_batch, 110))
    page_size = draw(st.sampled_from([1, 4, 16]))
    one = ceil_div(CONTEXT, page_size)
    return {
        "max_batch": max_batch,
        "max_step_tokens": max_step_tokens,
        "max_chunk_tokens": draw(st.integers(min(5, max_step_tokens), max_step_tokens)),
        "page_size": page_size,
        "num_pages": draw(st.integers(one, 2 * one)),
        "num_state_slots": draw(st.integers(1, max_batch + 1)) if has_states else 0,
    }


@pytest.mark.parametrize("name", NEW)
def test_any_schedule_gives_the_solo_logits(name: str) -> None:
    has_states = name in HYBRID
    reached = {"mixed": 0, "chunked": 0, "hit" if not has_states else "slot used again": 0}

    @given(limits=schedules(has_states), seed=st.integers(0, 10**6))
    @settings(max_examples=examples(8), deadline=None, derandomize=repeatable(), database=None, suppress_health_check=list(HealthCheck))
    def gate(limits: dict[str, int], seed: int) -> None:
        order = tuple(random.Random(seed).choices(range(len(PROMPTS)), k=5))
        engine, recorder, tokens = run(name, order, **limits)
        check(name, order, recorder, tokens)
        reached["mixed"] += sum(bool((p.length == 1).any() and (p.length > 1).any()) for p in recorder.plans)
        reached["chunked"] += sum(bool((p.num_samples == 0).any()) for p in recorder.plans)
        if has_states:
            assert engine.scheduler.num_prefix_hits == 0
            reached["slot used again"] += len(order) - len({int(s) for p in recorder.plans for s in p.state_slot})
        else:
            reached["hit"] += engine.scheduler.num_prefix_hits

    gate()
    assert all(reached.values()), f"states never reached: {reached}"


@pytest.mark.parametrize("name", NEW)
def test_a_preempted_sequence_is_computed_again(name: str) -> None:
    """Pages for the prompts and hardly more: who was admitted last gives way, its state with it, and starts from its first token."""
    order = (0, 1, 12)
    engine, recorder, tokens = run(name, order, max_batch=3, page_size=1, num_pages=14)
    check(name, order, recorder, tokens)
    assert engine.scheduler.num_preemptions > 0
    again = [place for place in range(len(order)) if len(recorder.logits[place][0]) > 1]
    assert again or name not in HYBRID


@pytest.mark.parametrize("name", HYBRID)
def test_a_state_slot_forgets_whose_it_was(name: str) -> None:
    """One slot for all, and chunks of one token, so that a newcomer's first row looks like decode. What is in a slot is never read by another."""
    order = (4, 12, 0)
    engine, recorder, tokens = run(name, order, max_batch=3, max_step_tokens=3, max_chunk_tokens=1, num_state_slots=1)
    check(name, order, recorder, tokens)
    assert {int(s) for p in recorder.plans for s in p.state_slot} == {0}
    assert max(p.num_rows for p in recorder.plans) == 1, "a slot is one sequence's"
    executor = engine.executor
    for tensor in executor.states.recurrent:  # type: ignore[attr-defined]
        tensor.fill_(np.nan)
    (result,) = engine.generate([list(PROMPTS[0])], params(0))
    assert result.completions[0].tokens == solo(name, 0)[1]
    assert result.num_cached_tokens == 0


def test_samples_of_one_request_each_have_a_state() -> None:
    """They share no prompt, since a hit would need its state, and each is the solo run with its own number."""
    many = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=MAX_NEW)
    engine = open_engine(model("qwen3_next"), max_batch=3)
    together = engine.generate([list(SHARED[:40])], many)[0]
    alone = open_engine(model("qwen3_next"), max_batch=1, max_chunk_tokens=7).generate([list(SHARED[:40])], many)[0]
    assert [c.tokens for c in together.completions] == [c.tokens for c in alone.completions]
    assert len({tuple(c.tokens) for c in together.completions}) == 3
    assert engine.scheduler.num_prefix_hits == 0


def test_a_failed_step_takes_its_states_with_it() -> None:
    """A layer fails when its rows' states are half written: they end, their slots are free, and whoever comes next starts from nothing."""
    engine = open_engine(model("qwen3_5"), max_batch=2, max_step_tokens=96)
    executor = engine.executor
    real = executor.states.write  # type: ignore[attr-defined]
    calls = 0

    def write(layer: int, *rest: object) -> None:
        nonlocal calls
        calls += 1
        real(layer, *rest)
        if calls == 5:
            raise RuntimeError("a layer failed")

    object.__setattr__(executor, "states", type("Failing", (), {"read": executor.states.read, "write": staticmethod(write)})())  # type: ignore[attr-defined]
    failed = engine.generate([list(PROMPTS[2]), list(PROMPTS[5])], params(0))
    assert [r.completions[0].finish_reason for r in failed] == [FinishReason.ERROR] * 2
    assert engine.scheduler.states.num_held == 0
    (result,) = engine.generate([list(PROMPTS[3])], params(3))
    assert result.completions[0].tokens == solo("qwen3_5", 3)[1]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "qwen3_next",
            {"num_state_slots": 0},
            "num_state_slots = 0: must be at least 1, since each sequence that runs holds one: 2 of its 4 layers are Gated DeltaNet",
        ),
        ("qwen3_moe", {"num_state_slots": 2}, "num_state_slots = 2: must be 0: the model has no Gated DeltaNet layers"),
        ("qwen3_moe", {"num_snapshots": 1}, "num_snapshots = 1: must be 0: the model has no Gated DeltaNet layers"),
    ],
)
def test_state_slots_and_snapshots_must_fit_the_model(name: str, given: dict[str, int], said: str) -> None:
    with pytest.raises(LimitError, match=said):
        open_engine(model(name), **given)
