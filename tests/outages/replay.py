"""What both replays need: engines of either kind, a record of what was launched, and what an engine must be like afterwards. Not a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import twinfer.fast
import twinfer.reference
from tests.fast.pair import DEVICE
from twinfer.engine.engine import Engine
from twinfer.golden import MICRO
from twinfer.limits import Limits
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason
from twinfer.sampling import SamplingParams

Make = Callable[[Limits], Engine]


def make_reference(limits: Limits) -> Engine:
    return twinfer.reference.Engine.from_pretrained(MICRO, dtype="float32", device="cpu", limits=limits, audit="full", tokenizer=False)


def make_fast(limits: Limits) -> Engine:
    """Launch by launch: a graph pads a step to its bucket, which would hide how large the step itself is."""
    return twinfer.fast.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits=limits, audit="full", tokenizer=False, graphs=False)


ENGINES: dict[str, Make] = {"reference": make_reference, "fast": make_fast}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Replay:
    """An engine under traffic: every plan that it launched, and the events of each request."""

    engine: Engine
    plans: list[StepPlan] = field(default_factory=list)
    events: dict[int, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        executor: Any = self.engine.executor
        launch = executor.launch

        def launched(plan: StepPlan) -> None:
            self.plans.append(plan)
            launch(plan)

        executor.launch = launched

    def add(self, prompt: list[int], num_tokens: int) -> int:
        request_id = self.engine.add(prompt, greedy(num_tokens))
        self.events[request_id] = []
        return request_id

    def step(self) -> None:
        for event in self.engine.step():
            self.events[event.request_id].append(event)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def references(self) -> int:
        """The most page references of a launched step, counted row by row."""
        size = self.engine.limits.page_size
        return max(sum(-(-(start + length) // size) for start, length in zip(p.start.tolist(), p.length.tolist(), strict=True)) for p in self.plans)

    def errors(self) -> list[str]:
        """What requests that failed were told."""
        return [events[-1].error or "" for events in self.events.values() if events and events[-1].finish_reason is FinishReason.ERROR]

    def check_all_completed(self) -> None:
        """Each request has one terminal event, for its length."""
        for request_id, events in self.events.items():
            assert [event.terminal for event in events].count(True) == 1, f"request {request_id}: {events}"
            assert events[-1].terminal
            assert events[-1].finish_reason is FinishReason.LENGTH, f"request {request_id}: {events[-1].error}"

    def check_engine_is_well(self) -> None:
        """Healthy, without work, all pages back, and the next request is served."""
        assert self.engine.healthy, self.engine.lost
        assert not self.engine.has_work
        pool = self.engine.scheduler.pool
        assert (pool.num_held, pool.num_available) == (0, self.engine.limits.num_pages), "pages were lost"
        next_one = self.add([1, 2, 3], 1)
        self.drain()
        assert self.events[next_one][-1].finish_reason is FinishReason.LENGTH


def told_numbers(error: str, bound: str) -> tuple[int, int]:
    """Demand and capacity out of an error that names `bound`."""
    assert bound in error, error
    found = re.search(r"(\d+)\D+?(\d+)", error.split(bound, 1)[1])
    assert found is not None, error
    return int(found[1]), int(found[2])
