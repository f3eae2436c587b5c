"""A state machine drives engines that compute: arrivals over shared prefixes, aborts, failed steps, refused rows, tight pools. The oracle: each request alone.

Tokens are the solo run's, and so are the logits of every position that any row computes: to the bit on the fast engine, to 1e-9 on the reference in
float64. Prompts are built from page-sized chunks over an alphabet of two, so that equal pages under different prefixes are common. Interesting states
are counted, and the test demands that all of them were reached. What can be asked without arithmetic is asked a thousand times as often by the
ghost's machine (tests/engine/test_machine.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.budget import examples
from tests.kernels.order import sum_in_order
from tests.traffic.subject import DEVICE, MAX_CONTEXT, Subject, different, fast, reference, watched
from twinfer.errors import LawViolation, StepFailed
from twinfer.limits import Limits, ceil_div
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from ..engine.ghosts import at_baseline

PROBES = ("preempted", "prefix_hit", "evicted", "abort_waiting", "abort_running", "abort_mid_prefill", "pool_full", "mixed_step", "chunked", "step_failed",
          "row_refused", "second_turn", "planned_ahead", "token_that_only_the_device_has", "compared_after_a_failure", "seeded_and_greedy")  # fmt: skip
FAST_PROBES = (*PROBES, "graph_padded", "launched_without_a_graph")
# In the interpreter a step takes a second: two dozen of them reach what most traffic reaches. The rest is reached on a GPU.
INTERPRETED = ("mixed_step", "chunked", "planned_ahead", "token_that_only_the_device_has", "graph_padded")

LONGEST, MOST_NEW = 16, 8  # tokens of a prompt and of an answer, so that even the tightest pool holds any one request

KITS = (SamplingParams(temperature=0.0, ignore_eos=True), SamplingParams(temperature=1.0, seed=11, ignore_eos=True))


@st.composite
def small_limits(draw: st.DrawFn) -> Limits:
    max_batch = draw(st.sampled_from([1, 2, 3, 4, 5]))
    max_step_tokens = draw(st.integers(max_batch, max_batch + 6) | st.integers(max_batch, 24))
    page_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    one = ceil_div(MAX_CONTEXT, page_size)
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=draw(st.just(max_step_tokens) | st.integers(1, max_step_tokens)),
        warmup_tokens=1,
        max_context=MAX_CONTEXT,
        max_step_context=draw(st.just(MAX_CONTEXT) | st.just(max_batch * MAX_CONTEXT)),
        max_logit_tokens=draw(st.integers(2, 8)),
        page_size=page_size,
        num_pages=draw(st.integers(ceil_div(LONGEST + MOST_NEW, page_size), one) | st.integers(one, one * max_batch)),
        look_ahead=draw(st.sampled_from([0, 1, 1, 2])),
    )


ARRIVAL = st.tuples(
    st.lists(st.sampled_from([0, 1]), max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(1, MOST_NEW), st.integers(0, 1)
)
SOME_STEPS = st.sampled_from([0, 0, 1, 2, 3])


class TrafficMachine(RuleBasedStateMachine):
    """One engine under random traffic; `subject` and `reached` are set on a class of each test's own."""

    subject: ClassVar[Subject]
    reached: ClassVar[Counter[str]]
    most: ClassVar[int]  # requests a machine may submit

    @initialize(limits=small_limits(), prefix_cache=st.sampled_from([True, True, False]), graphs=st.booleans())
    def start(self, limits: Limits, prefix_cache: bool, graphs: bool) -> None:
        self.limits, self.graphs = limits, graphs and self.subject.name == "fast"
        self.engine = self.subject.open(limits, prefix_cache, graphs)
        self.watch = watched(self.subject, self.engine)
        self.seen = self.watch.__enter__()
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.got: dict[int, list[int]] = {}
        self.live: set[int] = set()
        self.failed: set[int] = set()
        self.aborted: set[int] = set()
        self.turns: list[tuple[int, ...]] = []
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self._watch_executor()

    def _watch_executor(self) -> None:
        executor: Any = self.engine.executor
        launch, collect, in_flight = executor.launch, executor.collect, deque[StepPlan]()

        def watched_launch(plan: StepPlan) -> None:
            self.plans.append(plan)
            in_flight.append(plan)
            self.reached["planned_ahead"] += len(in_flight) > 1
            self.reached["token_that_only_the_device_has"] += bool((plan.tokens < 0).any())
            launch(plan)

        def watched_collect() -> StepOutput:
            plan, output = in_flight.popleft(), collect()
            if self.fail_next:
                self.fail_next = False
                owner = {s.id: s.request_id for s in self.engine.scheduler.running()}
                self.failed |= {owner[sequence] for sequence in plan.sequence.tolist() if sequence in owner}
                self.reached["step_failed"] += 1
                raise StepFailed("injected")
            return output

        executor.launch, executor.collect = watched_launch, watched_collect

    # ---- traffic -------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.asked) < self.most)
    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=3), count=SOME_STEPS)
    def submit(self, arrivals: list[tuple[list[int], list[int], int, int]], count: int) -> None:
        for chunks, tail, max_tokens, kit in arrivals:
            prompt = [token for token in chunks for _ in range(min(self.limits.page_size, 8))] + tail
            self._add(tuple(prompt[-LONGEST:]), max_tokens, kit)
        self._steps(count)

    @precondition(lambda self: self.turns and len(self.asked) < self.most)
    @rule(which=st.integers(0, 10**6), tail=st.lists(st.integers(0, 1), min_size=1, max_size=2), kit=st.integers(0, 1), count=SOME_STEPS)
    def next_turn(self, which: int, tail: list[int], kit: int, count: int) -> None:
        """Extends a finished request by its answer: catches what was sealed before it was written."""
        prompt = (*self.turns[which % len(self.turns)], *tail)
        if len(prompt) <= LONGEST:
            self._add(prompt, 1 + which % 4, kit)
            self.reached["second_turn"] += 1
        self._steps(count)

    def _add(self, prompt: tuple[int, ...], max_tokens: int, kit: int) -> None:
        params = dataclasses.replace(KITS[kit], max_tokens=max_tokens)
        request = self.engine.add(Request(prompt, params))
        self.asked[request], self.got[request] = (prompt, params), []
        self.live.add(request)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        self._steps(count)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10**6), waiting=st.booleans())
    def abort(self, which: int, waiting: bool) -> None:
        running, queued = self.engine.scheduler.running(), self.engine.scheduler.waiting()
        wanted = {s.request_id for s in (queued if waiting else running)} & self.live
        live = sorted(wanted or self.live)
        request = live[which % len(live)]
        own = [s for s in running if s.request_id == request]
        if self.engine.abort(request):
            self.aborted.add(request)
            self.reached["abort_waiting"] += not own
            self.reached["abort_running"] += bool(own)
            self.reached["abort_mid_prefill"] += any(s.num_generated == 0 for s in own)

    @precondition(lambda self: self.live)
    @rule(kind=st.sampled_from(["fail", "refuse", "drop_cache"]), which=st.integers(0, 10**6))
    def disturb(self, kind: str, which: int) -> None:
        if kind == "fail":
            self.fail_next = True
            self._step()
            self.fail_next = False
        elif kind == "drop_cache":
            self.engine.scheduler.pool.drop_cached()
        elif self.engine.scheduler.num_running:
            running = self.engine.scheduler.running()
            self._refuse(running[which % len(running)].id)

    def _refuse(self, refused: int) -> None:
        """The auditor refuses one sequence's row before launch: it ends, the others run in the same step."""
        real: Any = self.engine.auditor.audit

        def audit(plan: StepPlan, table: object) -> None:
            real(plan, table)
            rows = [i for i, sequence in enumerate(plan.sequence.tolist()) if sequence == refused]
            if rows:
                self.failed |= {s.request_id for s in self.engine.scheduler.running() if s.id == refused}
                self.reached["row_refused"] += 1
                raise LawViolation("injected", "this row", tuple(rows))

        auditor: Any = self.engine.auditor
        auditor.audit = audit
        try:
            self._step()
        finally:
            auditor.audit = real

    # ---- watching ------------------------------------------------------------------------------------------------------------

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        scheduler, reached = self.engine.scheduler, self.reached
        before = (scheduler.num_preemptions, scheduler.pool.num_evictions, scheduler.num_prefix_hits)
        self.plans = []
        events = self.engine.step()
        assert self.engine.healthy, self.engine.lost
        scheduler.check()
        for event in events:
            assert event.request_id in self.live, "an event of a request that has ended, or of none"
            self.got[event.request_id] += event.tokens
            if event.terminal:
                self.live.discard(event.request_id)
                self._end(event.request_id, event.finish_reason, event.error)
        self._compare()
        reached["preempted"] += scheduler.num_preemptions > before[0]
        reached["evicted"] += scheduler.pool.num_evictions > before[1]
        reached["prefix_hit"] += scheduler.num_prefix_hits > before[2]
        reached["pool_full"] += scheduler.pool.num_available == 0
        for plan in self.plans:
            reached["mixed_step"] += bool((plan.length == 1).any() and (plan.length > 1).any())
            reached["chunked"] += bool((plan.num_samples == 0).any())
            reached["seeded_and_greedy"] += len({*plan.sampling.temperature[plan.num_samples > 0].tolist()}) > 1
            if self.graphs:
                shape: Any = self.engine.executor._shapes.of(plan)  # type: ignore[attr-defined]
                reached["graph_padded"] += shape.captured and shape.num_tokens > plan.num_tokens
            else:
                reached["launched_without_a_graph"] += 1

    def _compare(self) -> None:
        """What was computed since the last step against the solo runs."""
        by_request: dict[int, list[tuple[int, Any]]] = {}
        for (request, position), kept in self.seen.items():
            by_request.setdefault(request, []).extend((position, each) for each in kept)
        self.seen.clear()
        for request, found in by_request.items():
            prompt, params = self.asked[request]
            wrong = different(self.subject, self.subject.solo(prompt, params), found)
            assert not wrong, f"request {request}, {prompt}: logits at positions {wrong} are not those of the request alone"
            self.reached["compared"] += len(found)
            self.reached["compared_after_a_failure"] += bool(self.failed) and request not in self.failed

    def _end(self, request: int, reason: FinishReason | None, error: str | None) -> None:
        prompt, params = self.asked[request]
        want, got = self.subject.solo(prompt, params).tokens[: params.max_tokens], self.got[request]
        assert got == want[: len(got)], f"request {request}, {prompt}: {got}, alone {want}"
        if reason is FinishReason.ERROR:
            assert request in self.failed, error
        elif reason is FinishReason.ABORT:
            assert request in self.aborted
        else:
            assert got == want
            self.turns.append((*prompt, *got))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "not drained"
        assert not self.live, "a request without a terminal event"
        assert at_baseline(self.engine.scheduler)
        self.watch.__exit__(None, None, None)
        self.engine.close()


def drive(subject: Subject, probes: tuple[str, ...], *, rounds: int, machines: int, rules: int, most: int) -> Counter[str]:
    """Rounds of random traffic, each from a seed of its own, until every probe was reached. A failure prints the seed's decorator."""

    class Driven(TrafficMachine):
        reached: ClassVar[Counter[str]] = Counter()

    Driven.subject, Driven.most = subject, most
    soak = examples(1)
    phases = (Phase.explicit, Phase.generate) + ((Phase.shrink,) if subject.name == "reference" else ())  # others would take hours to shrink
    for number in range(max(rounds, soak)):
        run_state_machine_as_test(
            seed(number)(Driven),
            settings=settings(
                max_examples=machines, stateful_step_count=rules, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
            ),
        )
        missing = [probe for probe in probes if Driven.reached[probe] == 0]
        if not missing and number + 1 >= soak:
            return Driven.reached
    raise AssertionError(f"states never reached: {missing}; reached: {dict(Driven.reached)}")


def test_the_reference_under_any_traffic() -> None:
    reached = drive(reference(), PROBES, rounds=6, machines=12, rules=25, most=16)
    assert reached["compared"] > 1000


def test_the_fast_engine_under_any_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)
    if DEVICE == "cuda":
        reached = drive(fast(), FAST_PROBES, rounds=6, machines=12, rules=25, most=16)
        assert reached["compared"] > 1000
    else:
        reached = drive(fast(), INTERPRETED, rounds=12, machines=2, rules=6, most=4)
        assert reached["compared"] > 20
