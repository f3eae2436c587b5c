"""While the same requests decode, a plan's columns are the very objects of the plan before, through the whole loop: what the quick path of audits rests on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from twinfer.invariants import auditor
from twinfer.invariants.facts import CONSTANT_COLUMNS
from twinfer.plan import StepPlan
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, limits


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_a_steady_batch_is_audited_the_quick_way(look_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GhostEngine(replace(limits(max_batch=4, max_step_tokens=16), look_ahead=look_ahead), audit="step")
    for i in range(3):
        engine.add(Request((i % 2,), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    for _ in range(3 + look_ahead):
        engine.step()
    plans: list[StepPlan] = []
    whole: list[StepPlan] = []
    launch, columns_fault = engine.executor.launch, auditor.columns_fault

    def kept(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    def looked_at(plan: StepPlan) -> str:
        whole.append(plan)
        return columns_fault(plan)

    engine.executor.launch = kept  # type: ignore[method-assign]
    monkeypatch.setattr(auditor, "columns_fault", looked_at)
    for _ in range(4):
        engine.step()
    assert len(plans) >= 4
    changed = [name for before, after in pairwise(plans) for name in CONSTANT_COLUMNS if getattr(before, name) is not getattr(after, name)]
    assert changed == []
    assert whole == [], "columns that were checked before are checked again"


def test_an_abort_of_a_request_that_waits_changes_no_column() -> None:
    engine = GhostEngine(limits(max_batch=1, max_step_tokens=8), audit="step")
    running = engine.add(Request((0,), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)))
    waiting = engine.add(Request((1,), SamplingParams(temperature=0.0, max_tokens=8)))
    engine.step()
    before = engine.scheduler._order
    engine.abort(waiting)
    assert engine.scheduler._order is before
    engine.abort(running)
    assert engine.scheduler._order is not before
