"""What executors do with a plan's copies: a sequence goes on from a snapshot, in another slot, as if it had never been away. Reference and ghost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.ghosts import VOCAB as GHOST_VOCAB
from tests.engine.ghosts import GhostEngine, drain, limits
from twinfer.engine.ghost import GhostExecutor, GhostMismatch
from twinfer.engine.trace import Trace
from twinfer.errors import StepFailed
from twinfer.executor import Executor
from twinfer.invariants.ledger import Ledger
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.reference import Engine
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .engines import open_engine, write_config
from .shapes import HYBRID

PROMPT = tuple(i * 7 % 3 for i in range(66))
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)


def pairs(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32).reshape(-1, 2)


def moved(trace: Trace, into: int = 2, snapshot: int = 1, **last: Any) -> Trace:
    """The same run, which after its first 64 tokens is saved and goes on from the snapshot in another slot; `last` changes the step that goes on."""
    first, second, *others = trace.plans
    assert int(first.length[0]) == int(second.start[0]) == 64
    elsewhere = [replace(plan, state_slot=np.array([into], np.int32)) for plan in (second, *others)]
    elsewhere[0] = replace(elsewhere[0], restores=pairs(snapshot, into), **last)
    return Trace(trace.limits, [replace(first, saves=pairs(int(first.state_slot[0]), snapshot)), *elsewhere])


def recorded(engine: Engine | GhostEngine) -> Trace:
    """One request's steps: 64 tokens, 2, and one each."""
    engine.trace = Trace(engine.limits)
    engine.add(Request(PROMPT, PARAMS))
    drain(engine)  # type: ignore[arg-type]
    return engine.trace


def same(found: list[StepOutput], expected: list[StepOutput]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert (a.sampled is None) == (b.sampled is None)
        assert a.sampled is None or b.sampled is None or np.array_equal(a.sampled.logprob, b.sampled.logprob)


def hybrid(folder: Path, name: str) -> Engine:
    return open_engine(write_config(folder, name), max_batch=3, max_chunk_tokens=64, num_state_slots=3, num_snapshots=2)


@pytest.mark.parametrize("name", HYBRID)
def test_the_reference_goes_on_from_a_snapshot(name: str, tmp_path: Path) -> None:
    """To the bit: a copy is of every layer, the convolution's history with it. What the old slot holds meanwhile is nobody's business."""
    trace = recorded(hybrid(tmp_path, name))
    expected = trace.replay(hybrid(tmp_path, name).executor)
    same(moved(trace).replay(hybrid(tmp_path, name).executor), expected)


@pytest.mark.parametrize("part", ["conv_snapshots", "recurrent_snapshots"])
def test_each_part_of_a_snapshot_counts(part: str, tmp_path: Path) -> None:
    """One part of it set to zero before it is read: other log probabilities, so that the test above can fail for either part."""
    trace = recorded(hybrid(tmp_path, "qwen3_next"))
    expected = trace.replay(hybrid(tmp_path, "qwen3_next").executor)
    executor = hybrid(tmp_path, "qwen3_next").executor
    first, *others = moved(trace).plans
    executor.launch(first)
    executor.collect()
    executor.buffers()[part][:, 1] = 0
    for plan, right in zip(others, expected[1:], strict=True):
        executor.launch(plan)
        found = executor.collect()
        assert found.sampled is not None
        assert right.sampled is not None
        assert not np.array_equal(found.sampled.logprob, right.sampled.logprob)


def test_a_trace_with_copies_is_saved_and_read(tmp_path: Path) -> None:
    made = moved(recorded(hybrid(tmp_path, "qwen3_5")))
    made.save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    assert [(p.restores.tolist(), p.saves.tolist()) for p in read.plans] == [(p.restores.tolist(), p.saves.tolist()) for p in made.plans]
    same(read.replay(hybrid(tmp_path, "qwen3_5").executor), made.replay(hybrid(tmp_path, "qwen3_5").executor))


WITHIN = replace(limits(max_batch=3, max_step_tokens=64, max_context=96, num_state_slots=3), num_snapshots=2)


def ghost() -> GhostExecutor:
    return GhostExecutor(WITHIN, GHOST_VOCAB, partial(Ledger(WITHIN, None, "float32").host, owner="reference"))


def test_the_ghost_goes_on_from_a_snapshot() -> None:
    trace = recorded(GhostEngine(WITHIN))
    same(moved(trace).replay(ghost()), trace.replay(ghost()))


def late_save(trace: Trace) -> list[StepPlan]:
    """The state is saved a step too late: the snapshot of 64 tokens holds 66."""
    first, second, *others = moved(trace).plans
    save = replace(second, state_slot=first.state_slot, restores=pairs(), saves=first.saves)
    return [replace(first, saves=pairs()), save, replace(second, delta=replace(second.delta, base=second.delta.base + 1)), *others]


def never_saved(trace: Trace) -> list[StepPlan]:
    first, *others = moved(trace).plans
    return [replace(first, saves=pairs()), *others]


def other_snapshot(trace: Trace) -> list[StepPlan]:
    first, *others = moved(trace).plans
    return [replace(first, saves=pairs(0, 0)), *others]


def not_restored(trace: Trace) -> list[StepPlan]:
    first, second, *others = moved(trace).plans
    return [first, replace(second, restores=pairs()), *others]


@pytest.mark.parametrize("made", [late_save, never_saved, other_snapshot, not_restored])
def test_the_ghost_tells_a_wrong_copy(made: Any) -> None:
    executor = ghost()
    plans = made(recorded(GhostEngine(WITHIN)))
    with pytest.raises(GhostMismatch, match="does not hold its history up to position 64"):
        run(executor, plans)


def test_what_a_failed_step_was_to_save_is_garbage() -> None:
    executor = ghost()
    first = moved(recorded(GhostEngine(WITHIN))).plans[0]

    def fail(plan: StepPlan) -> None:
        if plan.saves.size:
            raise StepFailed("injected")

    executor.fail_on = fail
    executor.launch(first)
    with pytest.raises(StepFailed):
        executor.collect()
    assert executor.snapshot_hash[1] == 0xBAD


def run(executor: Executor, plans: list[StepPlan]) -> None:
    for plan in plans:
        executor.launch(plan)
        executor.collect()
