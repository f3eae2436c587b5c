"""What fails inside the fast executor, with a step in flight behind it: only its rows end where the device lives, and everything where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE, SMALL
from twinfer.engine.engine import Engine
from twinfer.fast import executor as executor_module
from twinfer.fast import inputs
from twinfer.golden import MICRO
from twinfer.request import Event, FinishReason
from twinfer.sampling import SamplingParams

FIRST, SECOND = [67, 114, 121], [71, 111]
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def opened() -> Engine:
    return twinfer.fast.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits={**SMALL, "look_ahead": 1}, audit="full", graphs=False)


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """For failures that an engine outlives."""
    with opened() as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(shared: Engine) -> list[int]:
    """Tokens of the second request, with nothing going wrong."""
    (result,) = shared.generate([SECOND], GREEDY)
    return list(result.tokens)


def once(error: Exception, call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """`call`, which raises the first time: before it does anything, or after all of it."""
    raised = []

    def broken(*arguments: Any, **named: Any) -> Any:
        if raised:
            return call(*arguments, **named)
        raised.append(error)
        if after:
            call(*arguments, **named)
        raise error

    return broken


def started(engine: Engine) -> tuple[int, list[Event]]:
    """A request whose first step is in flight."""
    first = engine.add(FIRST, replace(GREEDY, max_tokens=4))
    events = engine.step()
    assert len(engine.in_flight) == 1
    return first, events


def drained(engine: Engine, events: list[Event]) -> dict[int, Event]:
    """The terminal event of each request, which has just one."""
    while engine.has_work:
        events += engine.step()
    ends = [event for event in events if event.terminal]
    assert len({event.request_id for event in ends}) == len(ends)
    return {event.request_id: event for event in ends}


@pytest.mark.parametrize(("place", "after"), [("_inputs._stage_samples", False), ("model.forward", True)])
def test_a_step_that_fails_ends_its_rows_and_nobody_else(shared: Engine, alone: list[int], place: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before it is collected as it is, the one behind it computes garbage for the same request; nobody else sees any of it."""
    engine = shared
    first, events = started(engine)
    owner, method = place.split(".")
    part = getattr(engine.executor, owner)
    monkeypatch.setattr(part, method, once(RuntimeError("a launch failed"), getattr(part, method), after))
    events += engine.step()  # launches the second step, which fails, and collects the first
    assert [(event.request_id, len(event.tokens), event.error) for event in events] == [(first, 1, None)]
    second = engine.add(SECOND, GREEDY)
    ends = drained(engine, events)
    assert ends[first].finish_reason is FinishReason.ERROR
    assert "RuntimeError: a launch failed" in (ends[first].error or "")
    assert ends[second].finish_reason is FinishReason.LENGTH
    assert [token for event in events if event.request_id == second for token in event.tokens] == alone
    assert engine.healthy
    assert engine.scheduler.pool.num_held == 0


def lose_in_launch(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.model, "forward", once(torch.AcceleratorError("an illegal memory access was encountered"), executor.model.forward))


def lose_behind_a_launch(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launcher raises a RuntimeError; that the device is gone shows when it is asked for an event."""
    gone = torch.AcceleratorError("an illegal memory access was encountered")
    monkeypatch.setattr(executor.model, "forward", once(RuntimeError("Triton Error [CUDA]"), executor.model.forward))
    monkeypatch.setattr(type(executor.device), "record", once(gone, type(executor.device).record))


def lose_the_page_table(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "update_page_table", once(RuntimeError("out of shared memory"), inputs.update_page_table))


@pytest.mark.parametrize("lose", [lose_in_launch, lose_behind_a_launch, lose_the_page_table])
def test_a_lost_device_ends_everything_and_closing_it_is_no_error(lose: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    first, events = started(engine)
    second = engine.add(SECOND, GREEDY)
    executor: Any = engine.executor
    lose(executor, monkeypatch)
    ends = drained(engine, events)
    assert {request: end.finish_reason for request, end in ends.items()} == dict.fromkeys((first, second), FinishReason.ERROR)
    assert not engine.healthy
    assert engine.scheduler.pool.num_held == 0

    def gone(*arguments: Any, **named: Any) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    # A context that is lost answers every call so.
    monkeypatch.setattr(type(executor.device), "synchronize", gone)
    monkeypatch.setattr(torch.Tensor, "new_empty", gone)
    monkeypatch.setattr(executor_module.torch.cuda, "empty_cache", gone)
    monkeypatch.setattr(executor, "device", replace(executor.device, compiled=True))
    engine.close()
    assert executor.buffers().keys() == {"page_table", "page_counts"}
    assert executor.model.weights.layers == ()
