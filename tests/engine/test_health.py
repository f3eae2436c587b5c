"""Healthy means that steps finish: an engine on which nothing succeeds says so, whoever is at fault, and one fault among steps that do succeed is not loss."""

from __future__ import annotations

import pytest

from twinfer.engine.loop import MOST_FAILED_STEPS
from twinfer.errors import LawViolation, StepFailed
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, drain, limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def ask(engine: GhostEngine) -> list[Event]:
    engine.add(Request((0, 1), GREEDY))
    return drain(engine)


def failing(engine: GhostEngine, every: int) -> None:
    """Each `every`-th step fails, its device alive."""
    collect, count = engine.executor.collect, [0]

    def collected() -> object:
        output = collect()
        count[0] += 1
        if count[0] % every == 0:
            raise StepFailed("out of memory")
        return output

    engine.executor.collect = collected  # type: ignore[method-assign,assignment]


def test_steps_that_fail_one_after_another_are_loss() -> None:
    engine = GhostEngine(limits())
    failing(engine, every=1)
    for number in range(MOST_FAILED_STEPS):
        assert engine.healthy, f"lost after {number} failed steps"
        (event,) = ask(engine)
        assert event.finish_reason is FinishReason.ERROR
    assert not engine.healthy
    assert f"{MOST_FAILED_STEPS} steps in a row failed" in (engine.lost or "")
    assert "out of memory" in (engine.lost or ""), "the cause is told"


def test_failures_among_steps_that_succeed_are_contained_for_ever() -> None:
    engine = GhostEngine(limits())
    failing(engine, every=2)
    for _ in range(3 * MOST_FAILED_STEPS):
        ask(engine)
    assert engine.num_steps > 2 * MOST_FAILED_STEPS
    assert engine.healthy


@pytest.mark.parametrize(("rows", "healthy"), [((), False), ((0,), True)])
def test_plans_that_are_refused_for_no_row_are_loss(rows: tuple[int, ...], healthy: bool) -> None:
    """With rows at fault these end, however many; with none, a second refusal says that no request is the cause."""
    engine = GhostEngine(limits(max_batch=1))

    def refuse(plan: StepPlan, table: object) -> None:
        raise LawViolation("table_version", "the table is ahead", rows)

    engine.auditor.audit = refuse  # type: ignore[method-assign,assignment]
    ids = [engine.add(Request((0, i % 2), GREEDY)) for i in range(4)]
    engine.auditor.level = "step"
    events = drain(engine)
    assert sorted(event.request_id for event in events if event.terminal) == ids
    assert engine.healthy == healthy
    assert healthy or "table_version" in (engine.lost or "")
