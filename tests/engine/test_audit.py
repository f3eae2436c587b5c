"""TWINFER_AUDIT: "1" turns the full audit on, whatever the engine was told, and no other value does. Seen by faults that only the full audit finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from twinfer.errors import LawViolation
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import VOCAB, GhostEngine, drain, limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OTHER_VALUES = ("0", "", "2", "full", "true", "yes", "on", " 1", "01")


def engine(audit: str | None) -> GhostEngine:
    """A ghost engine whose level is the argument's and the environment's."""
    return GhostEngine(limits(page_size=2), audit=audit)  # type: ignore[arg-type]


def after_a_lost_reference(audit: str | None) -> list[Event]:
    """A page's count goes up by one behind the scheduler's back: no step reads it, only the scan of all pages after a step can see it."""
    running = engine(audit)
    running.add(Request((0, 1, 0, 1, 0), GREEDY))
    events = running.step()
    running.scheduler.pool.references[running.limits.num_pages] += 1
    return events + running.step()


def after_a_bias_outside_the_vocabulary(audit: str | None) -> list[Event]:
    """The second of two rows gets a bias for a token that does not exist: only the scan of a plan's columns before the launch can see it."""
    running = engine(audit)
    running.add(Request((0, 1), GREEDY))
    running.add(Request((1, 0), SamplingParams(temperature=0.0, max_tokens=6, logit_bias={1: 0.5})))
    plan = running.scheduler.plan

    def wrong() -> StepPlan | None:
        right = plan()
        return None if right is None else replace(right, sampling=replace(right.sampling, bias_ids=right.sampling.bias_ids + np.int32(VOCAB)))

    running.scheduler.plan = wrong  # type: ignore[method-assign]
    return drain(running)


@pytest.mark.parametrize("audit", [None, "step", "full"])
def test_one_means_full(audit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_AUDIT", "1")
    made = engine(audit)
    assert made.auditor.level == "full"
    made.add(Request((0, 1, 0, 1, 0), GREEDY))
    assert [event.terminal for event in drain(made)] == [False] * 5 + [True]  # nothing is wrong, and the audit says so


@pytest.mark.parametrize("value", [None, *OTHER_VALUES])
def test_no_other_value_changes_the_level(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("TWINFER_AUDIT", raising=False)
    else:
        monkeypatch.setenv("TWINFER_AUDIT", value)
    assert [engine(audit).auditor.level for audit in (None, "step", "full")] == ["step", "step", "full"]


def test_the_variable_is_read_when_an_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when a module is imported, and an engine that runs keeps its level."""
    monkeypatch.delenv("TWINFER_AUDIT", raising=False)
    before = engine(None)
    monkeypatch.setenv("TWINFER_AUDIT", "1")
    assert (before.auditor.level, engine(None).auditor.level) == ("step", "full")
    monkeypatch.setenv("TWINFER_AUDIT", "0")
    assert engine(None).auditor.level == "step"


@pytest.mark.parametrize("value", [None, "0", "true"])
def test_without_it_no_step_scans(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("TWINFER_AUDIT", raising=False)
    else:
        monkeypatch.setenv("TWINFER_AUDIT", value)
    assert all(event.error is None for event in after_a_lost_reference(None) + after_a_bias_outside_the_vocabulary(None))


@pytest.mark.parametrize("audit", [None, "step", "full"])
def test_with_it_the_scan_after_a_step_finds_a_lost_reference(audit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_AUDIT", "1")
    with pytest.raises(LawViolation, match="references"):
        after_a_lost_reference(audit)


@pytest.mark.parametrize("audit", [None, "step", "full"])
def test_with_it_the_scan_before_a_launch_refuses_the_row_at_fault(audit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_AUDIT", "1")
    events = after_a_bias_outside_the_vocabulary(audit)
    ends = {event.request_id: event for event in events if event.terminal}
    assert ends[0].finish_reason is FinishReason.LENGTH
    assert ends[1].finish_reason is FinishReason.ERROR
    assert "sampling_ids" in (ends[1].error or "")
    assert not any(event.tokens for event in events if event.request_id == 1)
