"""Any schedule gives the solo logits: chunks, mixed steps, neighbours, preemption, few state slots, hits of pages and snapshots, failures, look-ahead.

The later types on the reference, to 1e-9 in fp64: a tiny model of each type with made-up weights; greedy and seeded tokens are equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.budget import examples
from tests.reference.recorder import F64, Recorder, log_softmax
from twinfer.errors import LimitError, StepFailed
from twinfer.limits import ceil_div
from twinfer.output import StepOutput
from twinfer.reference import Engine
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from .engines import VOCAB, open_engine, write_config
from .shapes import HYBRID, NEW

TOLERANCE = 1e-9  # logits near 8; found: below 1e-13
MAX_NEW, CONTEXT = 5, 208
SHARED = tuple(random.Random(8).choices(range(VOCAB), k=200))
OTHER = tuple(random.Random(9).choices(range(VOCAB), k=200))
# Beginnings of one text, some with tails of their own; those of 62 and 126 pass a point of the grid while they answer; the last leave it between two points.
PROMPTS = (
    *(SHARED[:n] + tail for n in (5, 16, 17, 40, 64, 66) for tail in ((33,), (44, 45))),
    (10,), SHARED[:80], (10, 11, 12), SHARED[:32], SHARED[:62], SHARED[:126], SHARED[:130], SHARED[:192],
    SHARED[:100] + OTHER[:60], SHARED[:100] + OTHER[60:150], OTHER[:62],
)  # fmt: skip
TURNS = (16, 17)  # of these the next turns come too: prompt, answer and a little more
NUM_PROMPTS = len(PROMPTS) + len(TURNS)
FOLDER = TemporaryDirectory()


def params(prompt: int) -> SamplingParams:
    """Every third request greedy, the others seeded with filters; stable for a prompt."""
    if prompt % 3 == 0:
        return SamplingParams(temperature=0.0, max_tokens=MAX_NEW)
    return SamplingParams(temperature=0.9, top_p=0.95, top_k=50 * (prompt % 2), seed=prompt, max_tokens=MAX_NEW)


@cache
def model(name: str) -> Path:
    return write_config(Path(FOLDER.name) / name, name)


def prompt_of(name: str, number: int) -> tuple[int, ...]:
    if number < len(PROMPTS):
        return PROMPTS[number]
    turn = TURNS[number - len(PROMPTS)]
    return (*PROMPTS[turn], *solo(name, turn)[1], 7, 8)


@dataclass
class Run:
    """One engine's run: sequences by id, which is the request's too, with the number of their prompt and what they wrote."""

    engine: Engine
    recorder: Recorder
    prompts: list[int]
    tokens: list[list[int]]
    failed: set[int]


def run(name: str, order: tuple[int, ...], gap: int = 0, fail: int = -1, abort: int = -1, **limits: int) -> Run:
    """Runs the prompts numbered in `order`, queued `gap` steps one after another (0: at once).

    fail    so many steps succeed, the next fails after it was computed, and its requests come again
    abort   after so many steps the request that was admitted last is aborted, and comes again
    """
    engine = open_engine(model(name), max_context=CONTEXT, **limits)
    done = Run(engine, Recorder(engine), [], [], set())
    collect, steps, waiting = engine.executor.collect, 0, list(order)

    def add(prompt: int) -> None:
        done.prompts.append(prompt)
        done.tokens.append([])
        engine.add(Request(prompt_of(name, prompt), params(prompt)))

    def failing() -> StepOutput:
        output = collect()
        if output.step == fail:
            raise StepFailed("injected")
        return output

    engine.executor.collect = failing  # type: ignore[method-assign]
    while engine.has_work or waiting:
        while waiting and (not gap or steps % gap == 0 or not engine.has_work):
            add(waiting.pop(0))
            if gap:
                break
        if steps == abort and engine.scheduler.num_running:
            last = engine.scheduler.running()[-1].request_id
            engine.abort(last)
            done.failed.add(last)
            waiting.append(done.prompts[last])
        for event in engine.step():
            if event.error is not None:
                assert "injected" in event.error
                done.failed.add(event.request_id)
                waiting.append(done.prompts[event.request_id])
            done.tokens[event.request_id] += event.tokens
        steps += 1
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == engine.scheduler.states.num_held == engine.scheduler.keeping.pool.num_pinned == 0
    return done


@cache
def solo(name: str, prompt: int) -> tuple[F64, tuple[int, ...]]:
    """Log probabilities at every position and the tokens of the prompt alone, whole."""
    done = run(name, (prompt,), max_batch=1, max_step_tokens=CONTEXT, max_chunk_tokens=CONTEXT, num_pages=13, num_snapshots=0)
    return log_softmax(done.recorder.of(0)), tuple(done.tokens[0])


def check(name: str, done: Run) -> None:
    for request, prompt in enumerate(done.prompts):
        expected, expected_tokens = solo(name, prompt)
        tokens = tuple(done.tokens[request])
        assert tokens == (expected_tokens[: len(tokens)] if request in done.failed else expected_tokens), f"prompt {prompt}"
        for position, versions in done.recorder.logits.get(request, {}).items():
            if position >= len(expected):
                continue  # a row beyond the last token, launched before it was read
            for logits in versions:
                assert np.abs(log_softmax(logits) - expected[position]).max() <= TOLERANCE, f"prompt {prompt} position {position}"


@st.composite
def schedules(draw: st.DrawFn, has_states: bool) -> dict[str, int]:
    max_batch = draw(st.integers(1, 5))
    max_step_tokens = draw(st.integers(max(max_batch, 20), 230))
    page_size = draw(st.sampled_from([1, 4, 16, 64, 128]))
    one = ceil_div(CONTEXT + 2, page_size)
    states = {
        "num_state_slots": draw(st.integers(1, max_batch + 1)),
        "num_snapshots": draw(st.sampled_from([0, 1, 2, 12])),
        "snapshot_interval": draw(st.sampled_from([64, 8192])),
    }
    return {
        "max_batch": max_batch,
        "max_step_tokens": max_step_tokens,
        "max_chunk_tokens": draw(st.integers(min(5, max_step_tokens), max_step_tokens)),
        "page_size": page_size,
        "num_pages": draw(st.integers(one, 2 * one)),
        "look_ahead": draw(st.integers(0, 2)),
        **(states if has_states else {}),
    }


MAX_ROUNDS = 12  # of 8 examples, each from a seed of its own; 2 to 5 reach everything
REACHED = ("mixed", "chunked", "hit")
STATEFUL = (*REACHED, "slot used again", "second turn", "saved", "restored", "restored again", "hit beside its maker", "failed a save")


@pytest.mark.parametrize("name", NEW)
def test_any_schedule_gives_the_solo_logits(name: str) -> None:
    has_states = name in HYBRID
    reached = dict.fromkeys(STATEFUL if has_states else REACHED, 0)

    @given(
        limits=schedules(has_states), draw=st.integers(0, 10**6), gap=st.integers(0, 3), fail=st.integers(-1, 8), abort=st.sampled_from([-1, -1, 2, 5]),
    )
    @settings(max_examples=examples(8), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def gate(limits: dict[str, int], draw: int, gap: int, fail: int, abort: int) -> None:
        order = tuple(random.Random(draw).choices(range(NUM_PROMPTS), [1 + 2 * (n >= 16) for n in range(NUM_PROMPTS)], k=6))
        done = run(name, order, gap, fail, abort, **limits)
        check(name, done)
        plans, scheduler = done.recorder.plans, done.engine.scheduler
        reached["mixed"] += sum(bool((p.length == 1).any() and (p.length > 1).any()) for p in plans)
        reached["chunked"] += sum(bool((p.num_samples == 0).any()) for p in plans)
        reached["hit"] += scheduler.num_prefix_hits
        if has_states:
            probe(done, reached)
            assert bool(limits["num_snapshots"]) or not scheduler.num_prefix_hits

    for number in range(MAX_ROUNDS):
        seed(number)(gate)()
        if all(reached.values()):
            return
    raise AssertionError(f"states never reached: {reached}")


def probe(done: Run, reached: dict[str, int]) -> None:
    plans = done.recorder.plans
    reached["slot used again"] += len(done.prompts) - len({int(s) for p in plans for s in p.state_slot})
    maker: dict[int, int] = {}
    for plan in plans:
        by_state = dict(zip(plan.state_slot.tolist(), plan.sequence.tolist(), strict=True))
        for snapshot, state in plan.restores.tolist():
            reached["restored"] += 1
            reached["restored again"] += sum(int(plan.step) != p.step and (p.restores[:, 0] == snapshot).any() for p in plans)
            reached["second turn"] += done.prompts[by_state[state]] >= len(PROMPTS)
            reached["hit beside its maker"] += maker[snapshot] in by_state.values()
        for state, snapshot in plan.saves.tolist():
            reached["saved"] += 1
            reached["failed a save"] += by_state[state] in done.failed
            maker[snapshot] = by_state[state]


@pytest.mark.parametrize("name", NEW)
def test_a_preempted_sequence_is_computed_again(name: str) -> None:
    """Pages for the prompts and hardly more: who was admitted last gives way, its state with it, and starts from its first token: no point of the grid yet."""
    order = (0, 1, 12)
    done = run(name, order, max_batch=3, page_size=1, num_pages=14)
    check(name, done)
    assert done.engine.scheduler.num_preemptions > 0
    again = [place for place in range(len(order)) if len(done.recorder.logits[place][0]) > 1]
    assert again or name not in HYBRID


@pytest.mark.parametrize("name", HYBRID)
def test_a_preempted_sequence_goes_on_from_its_snapshot(name: str) -> None:
    """Two prompts write past a point of the grid, and the pool has one page less than both need then: the second gives way and computes no token twice."""
    order = (16, NUM_PROMPTS - 1 - len(TURNS))
    done = run(name, order, max_batch=2, page_size=16, num_pages=9, num_snapshots=4)
    check(name, done)
    assert done.engine.scheduler.num_preemptions == 1
    assert [len(versions) for versions in done.recorder.logits[1].values()] == [1] * 66
    assert [plan.sequence.tolist() for plan in done.recorder.plans if plan.restores.size] == [[1]]


@pytest.mark.parametrize("name", HYBRID)
def test_a_state_slot_forgets_whose_it_was(name: str) -> None:
    """One slot for all, and chunks of one token, so that a newcomer's first row looks like decode. What is in a slot is never read by another."""
    order = (4, 12, 0)
    done = run(name, order, max_batch=3, max_step_tokens=3, max_chunk_tokens=1, num_state_slots=1)
    check(name, done)
    assert {int(s) for p in done.recorder.plans for s in p.state_slot} == {0}
    assert max(p.num_rows for p in done.recorder.plans) == 1, "a slot is one sequence's"
    executor = done.engine.executor
    for tensor in executor.states.recurrent:  # type: ignore[attr-defined]
        tensor.fill_(np.nan)
    (result,) = done.engine.generate([list(PROMPTS[0])], params(0))
    assert result.completions[0].tokens == solo(name, 0)[1]
    assert result.num_cached_tokens == 0


def test_samples_of_one_request_each_have_a_state() -> None:
    """They share the prompt up to a snapshot of the first one's state, and each is the solo run with its own number."""
    many = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=MAX_NEW)
    engine = open_engine(model("qwen3_next"), max_batch=3)
    together = engine.generate([list(SHARED[:70])], many)[0]
    alone = open_engine(model("qwen3_next"), max_batch=1, max_chunk_tokens=7, num_snapshots=0).generate([list(SHARED[:70])], many)[0]
    assert [c.tokens for c in together.completions] == [c.tokens for c in alone.completions]
    assert len({tuple(c.tokens) for c in together.completions}) == 3
    assert engine.scheduler.num_prefix_hits == 2 * 64


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
