"""A state machine drives the whole engine over the ghost executor: arrivals, shared prefixes, aborts, failures, tight pools. The oracle is the solo run.

Prompts are built from page-sized chunks over an alphabet of two, so that equal pages under different prefixes are common. Interesting states are
counted, and a last test demands that all of them were reached.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from twinfer.errors import LawViolation, RequestRefused, StepFailed
from twinfer.limits import Limits, ceil_div
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, solo

PROBES = (
    "preempted",
    "prefix_hit",
    "partial_hit",
    "full_hit_recomputes_last_page",
    "evicted",
    "abort_waiting",
    "abort_running",
    "abort_mid_prefill",
    "pool_full",
    "mixed_step",
    "chunked",
    "chunk_ends_on_page",
    "step_failed",
    "row_refused",
    "context_full",
    "second_turn_hits_answer",
    "step_context_binds",
    "batch_full",
)


@st.composite
def small_limits(draw: st.DrawFn) -> Limits:
    max_batch = draw(st.integers(1, 5))
    max_step_tokens = draw(st.integers(max_batch, 24))
    max_context = draw(st.integers(8, 40))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 4, 8, 64]))
    one = ceil_div(max_context, page_size)
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=draw(st.integers(1, max_step_tokens)),
        warmup_tokens=draw(st.integers(1, 8)),
        max_context=max_context,
        max_step_context=draw(st.integers(max_context, max_batch * max_context)),
        max_logit_tokens=draw(st.integers(1, 4)),
        page_size=page_size,
        num_pages=draw(st.integers(one, one + max(one * (max_batch - 1) // 2, 1)) | st.integers(max(1, one // 2), one * max_batch)),
        max_logprobs=2,
    )


ARRIVAL = st.tuples(st.lists(st.sampled_from([0, 1]), max_size=5), st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(1, 24))


class EngineMachine(RuleBasedStateMachine):
    """One engine under random traffic."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(limits=small_limits(), prefix_cache=st.booleans().map(lambda b: b or None))
    def start(self, limits: Limits, prefix_cache: bool | None) -> None:
        self.limits = limits
        self.engine = GhostEngine(limits, prefix_cache=prefix_cache is not None)
        self.expected: dict[int, list[int]] = {}
        self.failed: set[int] = set()
        self.aborted: set[int] = set()
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.finished: list[tuple[int, ...]] = []
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.second_turn: int | None = None

    # ---- traffic -------------------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=5))
    def submit(self, arrivals: list[tuple[list[int], list[int], int]]) -> None:
        for chunks, tail, max_tokens in arrivals:
            prompt = [token for token in chunks for _ in range(min(self.limits.page_size, 8))] + tail
            self._add(prompt[: self.limits.max_context - 1], max_tokens)

    @precondition(lambda self: self.finished)
    @rule(which=st.integers(0, 10**6), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3), max_tokens=st.integers(1, 6))
    def next_turn(self, which: int, tail: list[int], max_tokens: int) -> None:
        """Extends a finished request by its answer and a few tokens: catches what was sealed before it was written."""
        before = self.finished[which % len(self.finished)]
        if len(before) + len(tail) < self.limits.max_context:
            request_id = self._add([*before, *tail], max_tokens)
            self.second_turn = request_id

    def _add(self, prompt: list[int], max_tokens: int) -> int | None:
        request = Request(tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0))
        max_tokens = min(max_tokens, self.limits.max_context - len(prompt) + 1)  # one past the limit now and then
        fits = len(prompt) + max_tokens <= self.limits.max_context
        fits = fits and ceil_div(len(prompt) + max_tokens - 1, self.limits.page_size) <= self.limits.num_pages
        try:
            request_id = self.engine.add(request)
        except RequestRefused:
            assert not fits, "a request that fits was refused"
            return None
        assert fits, "a request that can never fit was accepted"
        self.expected[request_id] = solo(prompt, max_tokens)
        self.got[request_id] = []
        self.prompts[request_id] = tuple(prompt)
        return request_id

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: set(self.expected) - set(self.ended))
    @rule(which=st.integers(0, 10**6))
    def abort(self, which: int) -> None:
        live = sorted(set(self.expected) - set(self.ended))
        request_id = live[which % len(live)]
        running = {s.request_id: s for s in self.engine.scheduler.running()}
        probe = "abort_waiting" if request_id not in running else "abort_running"
        self.reached[probe] += 1
        if request_id in running and running[request_id].num_generated == 0:
            self.reached["abort_mid_prefill"] += 1
        assert self.engine.abort(request_id) == (request_id not in self.aborted)
        assert request_id not in {s.request_id for s in self.engine.scheduler.running() + self.engine.scheduler.waiting()}
        self.aborted.add(request_id)

    @rule()
    def fail_next_step(self) -> None:
        """The next step fails after launch with the device alive: its rows end, nobody else is touched."""

        def fail(plan: StepPlan) -> None:
            self.engine.executor.fail_on = None
            self.failed.update(s.request_id for s in self.engine.scheduler.sequences_of(plan, range(plan.num_rows)))
            self.reached["step_failed"] += 1
            raise StepFailed("injected")

        self.engine.executor.fail_on = fail
        self._step()
        self.engine.executor.fail_on = None

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(which=st.integers(0, 10**6))
    def refuse_a_row(self, which: int) -> None:
        """The auditor refuses one running sequence's row before launch: only that request ends, the others run in the same step."""
        running = self.engine.scheduler.running()
        sequence = running[which % len(running)]
        real = self.engine.auditor.audit

        def audit(plan: StepPlan, table: object) -> None:
            real(plan, table)  # type: ignore[arg-type]
            rows = [i for i, request in enumerate(plan.request.tolist()) if request == sequence.id]
            if rows:
                self.failed.add(sequence.request_id)
                self.reached["row_refused"] += 1
                raise LawViolation("injected", "this row", tuple(rows))

        self.engine.auditor.audit = audit  # type: ignore[method-assign]
        try:
            self._step()
        finally:
            self.engine.auditor.audit = real  # type: ignore[method-assign]

    @rule()
    def drop_cache(self) -> None:
        self.engine.scheduler.pool.drop_cached()

    # ---- watching ------------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        before = (scheduler.num_preemptions, scheduler.pool.num_evictions, scheduler.num_prefix_hits)
        plans: list[StepPlan] = []
        launch = self.engine.executor.launch

        def watch(plan: StepPlan) -> None:
            plans.append(plan)
            launch(plan)

        def check_and_watch(plan: StepPlan) -> None:
            scheduler.check_plan(plan)
            watch(plan)

        self.engine.executor.launch = check_and_watch  # type: ignore[method-assign]
        had_work = scheduler.has_work
        waiting = {s.id: len(s.tokens) for s in scheduler.waiting()}
        events = self.engine.step()
        self.engine.executor.launch = launch  # type: ignore[method-assign]
        assert plans or not had_work or events, "an empty step while work is pending"
        self._take(events)
        self._probe(before, plans, waiting)
        used = {p for s in scheduler.running() for p in scheduler.table.page_list(s.slot).tolist()}
        known = used | {p for p in range(1, self.limits.num_pages + 1) if scheduler.prefix.digest_of(p) is not None}
        self.engine.executor.poison([p for p in range(self.limits.num_pages + 1) if p not in known])

    def _probe(self, before: tuple[int, int, int], plans: list[StepPlan], waiting: dict[int, int]) -> None:
        scheduler, reached, size = self.engine.scheduler, self.reached, self.limits.page_size
        reached["preempted"] += scheduler.num_preemptions > before[0]
        reached["evicted"] += scheduler.pool.num_evictions > before[1]
        reached["prefix_hit"] += scheduler.num_prefix_hits > before[2]
        reached["pool_full"] += scheduler.pool.num_available == 0
        reached["batch_full"] += scheduler.num_running == self.limits.max_batch and scheduler.num_waiting > 0
        for plan in plans:
            reached["mixed_step"] += bool((plan.length == 1).any() and (plan.length > 1).any())
            ends = plan.start + plan.length
            chunk = plan.num_samples == 0
            reached["chunked"] += bool(chunk.any())
            reached["chunk_ends_on_page"] += bool((chunk & (ends % size == 0)).any())
            reached["context_full"] += bool((ends == self.limits.max_context - 1).any())
            reached["step_context_binds"] += plan.num_rows < scheduler.num_running and int(ends.sum()) + self.limits.max_context > self.limits.max_step_context
            for request, start in zip(plan.request.tolist(), plan.start.tolist(), strict=True):
                if request in waiting and start > 0:
                    reached["partial_hit"] += start < waiting[request] - 1
                    reached["full_hit_recomputes_last_page"] += start + size >= waiting[request]
                    sequence = next((s for s in scheduler.running() if s.id == request), None)
                    if sequence is not None and sequence.request_id == self.second_turn:
                        reached["second_turn_hits_answer"] += 1

    def _take(self, events: list[Event]) -> None:
        for event in events:
            request_id = event.request_id
            assert request_id not in self.ended, "an event after the terminal one"
            self.got[request_id].extend(event.tokens)
            expected = self.expected[request_id]
            assert self.got[request_id] == expected[: len(self.got[request_id])], "tokens differ from the solo run"
            assert event.terminal == (event.finish_reason is not None)
            if event.terminal:
                assert event.finish_reason is not None
                self.ended[request_id] = event.finish_reason
                if event.finish_reason is FinishReason.LENGTH:
                    assert self.got[request_id] == expected
                    self.finished.append((*self.prompts[request_id], *expected))
                elif event.finish_reason is FinishReason.ERROR:
                    assert request_id in self.failed, event.error
                else:
                    assert request_id in self.aborted

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "not drained"
        assert set(self.ended) == set(self.expected), "a request without a terminal event"
        assert at_baseline(self.engine.scheduler)
        for request_id in self.failed & set(self.ended):
            assert self.ended[request_id] in (FinishReason.ERROR, FinishReason.ABORT)


def test_engine_machine() -> None:
    EngineMachine.reached.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        ),
    )
    missing = [probe for probe in PROBES if EngineMachine.reached[probe] == 0]
    assert not missing, f"states never reached: {missing}; reached: {dict(EngineMachine.reached)}"
