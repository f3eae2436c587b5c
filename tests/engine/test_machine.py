"""A state machine drives the whole engine over the ghost executor: arrivals, samples, shared prefixes, aborts, failures, tight pools. The oracle: the solo run.

Prompts are built from page-sized chunks over an alphabet of two, so that equal pages under different prefixes are common. Every launched row is
compared with the parameters that its own sample must have by then, every log probability with the position that it belongs to. Interesting states
are counted, and a last test demands that all of them were reached.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.budget import examples
from twinfer.engine.sequence import Sequence
from twinfer.errors import LawViolation, RequestRefused, StepFailed
from twinfer.limits import Limits, ceil_div
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request, TokenLogprob
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline
from .oracle import Expected, fits, mark, marks

PROBES = (
    "preempted",
    "prefix_hit",
    "partial_hit",
    "full_hit_recomputes_last_page",
    "evicted",
    "abort_waiting",
    "abort_before_the_first_step",
    "abort_preempted",
    "abort_running",
    "abort_mid_prefill",
    "abort_some_samples_run_and_some_wait",
    "abort_between_ends_of_samples",
    "pool_full",
    "mixed_step",
    "chunked",
    "chunk_ends_on_page",
    "step_failed",
    "row_refused",
    "one_sample_failed_another_went_on",
    "context_full",
    "second_turn_hits_answer",
    "step_context_binds",
    "batch_full",
    "samples_differ",
    "samples_share_the_prompt",
    "sample_preempted",
    "ended_by_max_tokens",
    "ended_by_room",
    "ended_by_stop_token",
    "ended_by_the_first_token",
    "end_token_passed_over_by_min_tokens",
    "bans_in_plan",
    "bias_in_plan",
    "penalties_in_plan",
    "penalties_after_preemption",
    "different_parameters_in_one_step",
    "logprobs",
    "different_numbers_of_logprobs_in_one_step",
    "prompt_logprobs",
    "prompt_scored_in_chunks",
    "prompt_scored_again",
    "planned_ahead",
    "token_that_only_the_device_has",
    "row_of_a_sample_that_has_ended",
    "states",
    "state_slots_full",
    "state_slot_used_again",
    "state_slot_used_again_by_a_chunk_of_one",
    "state_of_a_preempted_one_computed_again",
    "states_planned_ahead",
)

# Numbers are exact in float32. Token 2 never stands in a prompt, tokens 0 and 1 do.
KITS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"n": 2},
    {"n": 3, "temperature": 1.0, "seed": 5},
    {"stop_token_ids": (1,)},
    {"stop_token_ids": (0, 2), "min_tokens": 3},
    {"presence_penalty": 0.5, "prompt_logprobs": 1},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "logit_bias": {1: -1.0}},
    {"logprobs": 0},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"prompt_logprobs": 0, "n": 2, "temperature": 0.5, "seed": 0},
    {"temperature": 0.75, "seed": 2**64 - 1, "top_k": 2, "top_p": 0.5, "min_p": 0.25, "logprobs": 1},
    {"max_tokens": None, "stop_token_ids": (2,), "min_tokens": 5},
    {"max_tokens": None, "prompt_logprobs": 2},
    {"stop_token_ids": (0, 1, 2), "logprobs": 1},
    {"n": 4, "temperature": 2.0, "seed": 9, "stop_token_ids": (0,), "min_tokens": 2, "logprobs": 1, "repetition_penalty": 2.0},
)


@st.composite
def small_limits(draw: st.DrawFn) -> Limits:
    max_batch = draw(st.sampled_from([1, 2, 3, 3, 4, 5]))
    max_step_tokens = draw(st.integers(max_batch, max_batch + 4) | st.integers(max_batch, 24))
    max_context = draw(st.integers(8, 32))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 4, 8, 64]))
    one = ceil_div(max_context, page_size)
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=draw(st.just(max_step_tokens) | st.integers(1, max_step_tokens) | st.integers(1, min(6, max_step_tokens))),
        warmup_tokens=draw(st.integers(1, 8)),
        max_context=max_context,
        max_step_context=draw(st.just(max_context) | st.integers(max_context, max_batch * max_context)),
        max_logit_tokens=draw(st.integers(1, 4)),
        page_size=page_size,
        num_pages=draw(st.integers(max(1, one // 2), one) | st.integers(one, one + max(one // 2, 1)) | st.integers(one, one * max_batch)),
        look_ahead=draw(st.sampled_from([0, 0, 1, 2])),
        max_logprobs=2,
    )


ARRIVAL = st.tuples(
    st.lists(st.sampled_from([0, 1]), max_size=5),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.integers(1, 20),
    st.sampled_from(KITS),
)

SOME_STEPS = st.sampled_from([0, 0, 1, 2, 3, 6])

Sample = tuple[int, int]  # request id, index among its samples


class EngineMachine(RuleBasedStateMachine):
    """One engine under random traffic."""

    reached: ClassVar[Counter[str]] = Counter()
    most_steps: ClassVar[int] = 3000  # that draining may take

    @initialize(limits=small_limits(), prefix_cache=st.booleans().map(lambda b: b or None), num_states=st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5]))
    def start(self, limits: Limits, prefix_cache: bool | None, num_states: int) -> None:
        """A model that keeps states and no snapshots has no use of a prefix cache: it is asked for and must stay off."""
        self._start(dataclasses.replace(limits, num_state_slots=num_states), prefix_cache is not None or num_states > 0)

    def _start(self, limits: Limits, prefix_cache: bool) -> None:
        self.limits = limits
        self.engine = GhostEngine(limits, prefix_cache=prefix_cache)
        self.expected: dict[Sample, Expected] = {}
        self.got: dict[Sample, list[int]] = {}
        self.ended: dict[Sample, FinishReason] = {}
        self.failed: set[Sample] = set()
        self.live: dict[int, int] = {}  # request id -> its n, until its terminal event
        self.done: set[int] = set()
        self.aborted: set[int] = set()
        self.finished: list[tuple[tuple[int, ...], int]] = []  # tokens of a whole turn, and how many of them were its prompt
        self.second_turn: dict[int, int] = {}  # request id -> length of the prompt that its own extends
        self.sample_of: dict[int, Sample] = {}  # by sequence id
        self.plans: list[StepPlan] = []  # of the last engine step
        self.num_collected = 0
        self.fail_next = False
        self.used_states: set[int] = set()
        self._watch_executor()

    def _watch_executor(self) -> None:
        """Checks each plan as it is launched; puts marks in the place of the ghost's log probabilities, which are all 0."""
        executor, in_flight = self.engine.executor, deque[StepPlan]()
        launch, collect = executor.launch, executor.collect

        def watched_launch(plan: StepPlan) -> None:
            self._check_plan(plan)
            self.plans.append(plan)
            in_flight.append(plan)
            self.reached["planned_ahead"] += len(in_flight) > 1
            self.reached["token_that_only_the_device_has"] += bool((plan.tokens < 0).any())
            launch(plan)

        def watched_collect() -> StepOutput:
            self.num_collected += 1
            plan = in_flight.popleft()
            self.reached["row_of_a_sample_that_has_ended"] += any(self.sample_of[sequence] in self.ended for sequence in plan.sequence.tolist())
            output = collect()
            if self.fail_next:
                self.fail_next = False
                self.failed.update({self.sample_of[sequence] for sequence in plan.sequence.tolist()} - set(self.ended))
                self.reached["step_failed"] += 1
                raise StepFailed("injected")
            sampled = marks(plan.sequence, plan.start + plan.length, plan.num_samples)
            scored = marks(plan.sequence, plan.start + 1, plan.num_scored)
            return dataclasses.replace(
                output,
                sampled=None if output.sampled is None else dataclasses.replace(output.sampled, logprob=sampled),
                scored=None if output.scored is None else dataclasses.replace(output.scored, logprob=scored),
            )

        executor.launch, executor.collect = watched_launch, watched_collect  # type: ignore[method-assign]
        executor.history = lambda sequence: self.expected[self.sample_of[sequence]].history()

    # ---- traffic -------------------------------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=4), count=SOME_STEPS)
    def submit(self, arrivals: list[tuple[list[int], list[int], int, dict[str, Any]]], count: int) -> None:
        for chunks, tail, max_tokens, kit in arrivals:
            prompt = [token for token in chunks for _ in range(self._chunk())] + tail
            self._add(prompt[: self.limits.max_context - 1], max_tokens, kit)
        self._steps(count)

    def _chunk(self) -> int:
        """Tokens of a prompt's chunks."""
        return min(self.limits.page_size, 8)

    @precondition(lambda self: self.finished)
    @rule(which=st.integers(0, 10**6), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3), kit=st.sampled_from(KITS[:8]), count=SOME_STEPS)
    def next_turn(self, which: int, tail: list[int], kit: dict[str, Any], count: int) -> None:
        """Extends a finished request by its answer and a few tokens: catches what was sealed before it was written."""
        before, num_prompt = self.finished[which % len(self.finished)]
        if len(before) + len(tail) < self.limits.max_context:
            request_id = self._add([*before, *tail], 1 + which % 6, kit)
            if request_id is not None:
                self.second_turn[request_id] = num_prompt
        self._steps(count)

    def _add(self, prompt: list[int], max_tokens: int, kit: dict[str, Any]) -> int | None:
        """Submits a request; its max_tokens is now and then one past the limit."""
        values = {"temperature": 0.0, "max_tokens": min(max_tokens, self.limits.max_context - len(prompt) + 1), **kit}
        if values["max_tokens"] is not None:
            values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
        params = SamplingParams(**values)
        possible = fits(len(prompt), params.max_tokens, self.limits)
        try:
            request_id = self.engine.add(Request(tuple(prompt), params))
        except RequestRefused:
            assert not possible, "a request that fits was refused"
            return None
        assert possible, "a request that can never fit was accepted"
        self.live[request_id] = params.n
        for sample in range(params.n):
            self.expected[request_id, sample] = Expected.of(tuple(prompt), params, sample, self.limits)
            self.got[request_id, sample] = []
        self.sample_of.update({s.id: (s.request_id, s.sample) for s in self.engine.scheduler.waiting()})
        return request_id

    @rule(count=st.just(1) | st.integers(1, 12))
    def steps(self, count: int) -> None:
        self._steps(count)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10**6), where=st.sampled_from(["anywhere", "waiting", "running", "preempted", "split"]))
    def abort(self, which: int, where: str) -> None:
        """Ends a request, preferably one in the state that is asked for: split is some samples running, some waiting."""
        running, waiting = self.engine.scheduler.running(), self.engine.scheduler.waiting()
        on, off = {s.request_id for s in running}, {s.request_id for s in waiting}
        wanted = {"waiting": off, "running": on, "preempted": {s.request_id for s in waiting if s.num_preemptions}, "split": on & off}
        live = sorted(wanted.get(where) or self.live)
        self._abort(live[which % len(live)])

    def _abort(self, request_id: int) -> None:
        running, waiting = self.engine.scheduler.running(), self.engine.scheduler.waiting()
        own, queued = ([s for s in sequences if s.request_id == request_id] for sequences in (running, waiting))
        self._probe_abort(request_id, own, queued)
        assert self.engine.abort(request_id) == (request_id not in self.aborted)
        assert request_id not in {s.request_id for s in self.engine.scheduler.running() + self.engine.scheduler.waiting()}
        self.aborted.add(request_id)

    @precondition(lambda self: any(s.num_preemptions for s in self.engine.scheduler.waiting()))
    @rule(which=st.integers(0, 10**6))
    def abort_a_preempted(self, which: int) -> None:
        """Preempted sequences wait for a few steps only, so chance alone seldom aborts one."""
        waiting = [s for s in self.engine.scheduler.waiting() if s.num_preemptions]
        self._abort(waiting[which % len(waiting)].request_id)

    def _probe_abort(self, request_id: int, running: list[Sequence], waiting: list[Sequence]) -> None:
        reached = self.reached
        reached["abort_waiting"] += bool(waiting) and not running
        reached["abort_before_the_first_step"] += len(waiting) == self.live[request_id] and not any(s.num_preemptions for s in waiting)
        reached["abort_running"] += bool(running)
        reached["abort_preempted"] += any(s.num_preemptions for s in waiting)
        reached["abort_mid_prefill"] += any(s.num_generated == 0 for s in running)
        reached["abort_some_samples_run_and_some_wait"] += bool(running) and bool(waiting)
        ended = [sample for sample in self.ended if sample[0] == request_id]
        reached["abort_between_ends_of_samples"] += bool(ended) and request_id not in self.aborted

    @rule(kind=st.sampled_from(["fail", "refuse", "drop_cache"]), which=st.integers(0, 10**6))
    def disturb(self, kind: str, which: int) -> None:
        if kind == "fail":
            self._fail_a_step()
        elif kind == "drop_cache":
            self.engine.scheduler.pool.drop_cached()
        elif self.engine.scheduler.num_running:
            running = self.engine.scheduler.running()
            self._refuse_a_row(running[which % len(running)])

    def _fail_a_step(self) -> None:
        """The next step that is over fails with the device alive, after it has written its slots: its rows end, nobody else is touched."""
        self.fail_next = True
        self._step()
        self.fail_next = False

    def _refuse_a_row(self, sequence: Sequence) -> None:
        """The auditor refuses one running sequence's row before launch: only that sample ends, the others run in the same step."""
        real = self.engine.auditor.audit

        def audit(plan: StepPlan, table: object) -> None:
            real(plan, table)  # type: ignore[arg-type]
            rows = [i for i, identity in enumerate(plan.sequence.tolist()) if identity == sequence.id]
            if rows:
                self.failed.add((sequence.request_id, sequence.sample))
                self.reached["row_refused"] += 1
                raise LawViolation("injected", "this row", tuple(rows))

        self.engine.auditor.audit = audit  # type: ignore[method-assign]
        try:
            self._step()
        finally:
            self.engine.auditor.audit = real  # type: ignore[method-assign]

    # ---- watching ------------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        scheduler = self.engine.scheduler
        before = (scheduler.num_preemptions, scheduler.pool.num_evictions, scheduler.num_prefix_hits)
        self.plans, self.num_collected = [], 0
        had_work = scheduler.has_work
        waiting = {s.id: len(s.tokens) for s in scheduler.waiting()}
        events = self.engine.step()
        assert self.engine.healthy, self.engine.lost
        assert self.plans or self.num_collected or not had_work or events, "an empty step while work is pending"
        self._take(events)
        self._probe(before, waiting)
        held = set(np.flatnonzero(scheduler.pool.references).tolist())
        known = held | {p for p in range(1, self.limits.num_pages + 1) if scheduler.prefix.digest_of(p) is not None}
        self.engine.executor.poison([p for p in range(self.limits.num_pages + 1) if p not in known])
        self.engine.executor.poison_states(scheduler.states.free())
        self.engine.executor.poison_snapshots(scheduler.keeping.pool.free())

    def _check_plan(self, plan: StepPlan) -> None:
        """Pages are written by one row alone, and each row carries its own sample's parameters."""
        self.engine.scheduler.check_plan(plan)
        ends = (plan.start + plan.length).tolist()
        for row, (sequence, end, samples) in enumerate(zip(plan.sequence.tolist(), ends, plan.num_samples.tolist(), strict=True)):
            expected = self.expected[self.sample_of[sequence]]
            expected.check_columns(plan.sampling, row, end, bool(samples))
            scored = expected.params.prompt_logprobs if self.sample_of[sequence][1] == 0 else None
            assert int(plan.scored_logprobs[row]) == (-1 if scored is None else scored)
            assert int(plan.num_scored[row]) == (0 if scored is None else max(0, min(end, len(expected.prompt) - 1) - int(plan.start[row])))

    def _probe(self, before: tuple[int, int, int], waiting: dict[int, int]) -> None:
        scheduler, reached = self.engine.scheduler, self.reached
        reached["preempted"] += scheduler.num_preemptions > before[0]
        reached["evicted"] += scheduler.pool.num_evictions > before[1]
        reached["prefix_hit"] += scheduler.num_prefix_hits > before[2]
        reached["pool_full"] += scheduler.pool.num_available == 0
        reached["batch_full"] += scheduler.num_running == self.limits.max_batch and scheduler.num_waiting > 0
        reached["sample_preempted"] += any(s.sample > 0 and s.num_preemptions for s in scheduler.waiting())
        running = {s.id: s for s in scheduler.running()}
        reached["state_slots_full"] += bool(scheduler.states.num_slots and not scheduler.states.available and scheduler.num_waiting)
        for plan in self.plans:
            self._probe_lengths(plan, len(running))
            self._probe_states(plan, running)
            self._probe_parameters(plan, running)
            for sequence, start in zip(plan.sequence.tolist(), plan.start.tolist(), strict=True):
                if sequence in waiting and start > 0:
                    reached["partial_hit"] += start < waiting[sequence] - 1
                    reached["full_hit_recomputes_last_page"] += start + self.limits.page_size >= waiting[sequence]
                    reached["samples_share_the_prompt"] += self.sample_of[sequence][1] > 0
                    reached["second_turn_hits_answer"] += start > self.second_turn.get(self.sample_of[sequence][0], self.limits.max_context)

    def _probe_lengths(self, plan: StepPlan, num_running: int) -> None:
        reached, ends, chunk = self.reached, plan.start + plan.length, plan.num_samples == 0
        reached["mixed_step"] += bool((plan.length == 1).any() and (plan.length > 1).any())
        reached["chunked"] += bool(chunk.any())
        reached["chunk_ends_on_page"] += bool((chunk & (ends % self.limits.page_size == 0)).any())
        reached["context_full"] += bool((ends == self.limits.max_context - 1).any())
        reached["step_context_binds"] += plan.num_rows < num_running and int(ends.sum()) + self.limits.max_context > self.limits.max_step_context

    def _probe_states(self, plan: StepPlan, running: dict[int, Sequence]) -> None:
        reached = self.reached
        if not self.limits.num_state_slots:
            return
        reached["states"] += 1
        reached["states_planned_ahead"] += len(self.plans) > self.num_collected
        columns = (plan.state_slot.tolist(), plan.sequence.tolist(), plan.start.tolist(), plan.length.tolist())
        for state, sequence, start, length in zip(*columns, strict=True):
            again = start == 0 and state in self.used_states
            reached["state_slot_used_again"] += again
            reached["state_slot_used_again_by_a_chunk_of_one"] += again and length == 1
            reached["state_of_a_preempted_one_computed_again"] += again and sequence in running and running[sequence].num_preemptions > 0
        self.used_states.update(columns[0])

    def _probe_parameters(self, plan: StepPlan, running: dict[int, Sequence]) -> None:
        reached, sampling = self.reached, plan.sampling
        banned = np.isneginf(sampling.bias_values)
        reached["bans_in_plan"] += bool(banned.any())
        reached["bias_in_plan"] += bool((~banned).any())
        reached["penalties_in_plan"] += bool((sampling.seen_counts > 1).any())
        again = [row for row, s in enumerate(plan.sequence.tolist()) if s in running and running[s].num_preemptions and plan.num_samples[row]]
        reached["penalties_after_preemption"] += any(
            (sampling.seen_counts[sampling.seen_indptr[row] : sampling.seen_indptr[row + 1]] > 0).any() for row in again
        )
        drawing = plan.num_samples > 0
        reached["different_parameters_in_one_step"] += len(set(sampling.temperature[drawing].tolist())) > 1
        reached["different_numbers_of_logprobs_in_one_step"] += len(set(sampling.num_logprobs[drawing].tolist()) - {-1}) > 1
        reached["prompt_scored_in_chunks"] += bool(((plan.num_scored > 0) & (plan.num_samples == 0)).any())
        scored = plan.num_scored > 0
        reached["prompt_scored_again"] += any(s in running and running[s].num_preemptions for s in plan.sequence[scored].tolist())

    def _take(self, events: list[Event]) -> None:
        for event in events:
            sample = (event.request_id, event.sample)
            assert event.request_id not in self.done, "an event after the terminal one"
            assert sample not in self.ended, "an event after the sample's last one"
            expected, got = self.expected[sample], self.got[sample]
            first = not got
            got.extend(event.tokens)
            assert got == expected.tokens[: len(got)], "tokens differ from the solo run"
            self._check_logprobs(event, expected, len(got), first)
            self._check_hit(event, expected)
            if event.finish_reason is None:
                assert len(event.tokens) == 1
                assert not event.terminal
            else:
                self._end(event, expected)

    def _check_logprobs(self, event: Event, expected: Expected, num_got: int, first: bool) -> None:
        """One entry a token with as many alternatives as were asked for, and that of this very position; the prompt's with the first token."""
        sequence = next(s for s, sample in self.sample_of.items() if sample == (event.request_id, event.sample))
        position = len(expected.prompt) + num_got - 1
        want = None if expected.params.logprobs is None or not event.tokens else (entry(event.tokens[0], mark(sequence, position), expected.params.logprobs),)
        assert event.logprobs == want, f"{event.logprobs} is not {want}"
        scored = expected.params.prompt_logprobs if event.sample == 0 else None
        if scored is None or not event.tokens or not first:
            assert event.prompt_logprobs is None
        else:
            assert event.prompt_logprobs == tuple(entry(expected.prompt[p], mark(sequence, p), scored) for p in range(1, len(expected.prompt)))
        self.reached["logprobs"] += event.logprobs is not None
        self.reached["prompt_logprobs"] += bool(event.prompt_logprobs)

    def _check_hit(self, event: Event, expected: Expected) -> None:
        """A hit is whole pages (and whole chunks of a state), leaves a token to compute, and is none for a prompt that is scored or without a cache."""
        cached = event.num_cached_tokens
        assert cached % self.engine.scheduler.hit_grid == 0
        assert cached < len(expected.prompt)
        if not self.engine.scheduler.prefix_cache or (expected.params.prompt_logprobs is not None and event.sample == 0):
            assert cached == 0

    def _end(self, event: Event, expected: Expected) -> None:
        """The last event of a sample: for the right reason, with all its tokens, and terminal if no other sample is open."""
        request_id, reason, reached = event.request_id, event.finish_reason, self.reached
        sample, got = (request_id, event.sample), self.got[request_id, event.sample]
        assert reason is not None
        self.ended[sample] = reason
        own = [self.ended.get((request_id, i)) for i in range(self.live[request_id])]
        assert event.terminal == (None not in own)
        if event.terminal:
            self.done.add(request_id)
            del self.live[request_id]
            reached["one_sample_failed_another_went_on"] += FinishReason.ERROR in own and bool({FinishReason.LENGTH, FinishReason.STOP} & set(own))
            reached["samples_differ"] += len({tuple(self.got[request_id, i]) for i in range(len(own))}) == len(own) > 1
        if reason is FinishReason.ERROR:
            assert sample in self.failed, event.error
        elif reason is FinishReason.ABORT:
            assert request_id in self.aborted
        else:
            assert (got, reason) == (expected.tokens, expected.reason)
            self.finished.append(((*expected.prompt, *got), len(expected.prompt)))
            self._probe_end(expected)

    def _probe_end(self, expected: Expected) -> None:
        reached, params, stopped = self.reached, expected.params, expected.reason is FinishReason.STOP
        reached["ended_by_stop_token"] += stopped
        reached["ended_by_the_first_token"] += stopped and len(expected.tokens) == 1
        reached["ended_by_max_tokens"] += not stopped and params.max_tokens is not None
        reached["ended_by_room"] += not stopped and params.max_tokens is None
        reached["end_token_passed_over_by_min_tokens"] += bool(set(params.stop_token_ids) & set(expected.tokens[:-1]))

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(self.most_steps):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "not drained"
        assert self.done == {request_id for request_id, _ in self.expected}, "a request without a terminal event"
        assert set(self.ended) == set(self.expected), "a sample without an end"
        assert at_baseline(self.engine.scheduler)
        for sample in self.failed:
            assert self.ended[sample] in (FinishReason.ERROR, FinishReason.ABORT)


def entry(token: int, logprob: float, num_alternatives: int) -> TokenLogprob:
    """What the ghost and the marks give: the alternatives are the lowest ids, all sure."""
    return TokenLogprob(token, logprob, tuple((i, 0.0) for i in range(num_alternatives)))


MAX_ROUNDS = 12  # of 40 examples; 2 to 4 reach every probe, which depends on the version of Python and of hypothesis


def run_rounds(machine: type[EngineMachine], probes: tuple[str, ...], max_examples: int, max_rounds: int = MAX_ROUNDS) -> None:
    """Rounds of random traffic, each from a seed of its own, until every probe was reached; at least two. A failure prints the seed's decorator."""
    machine.reached.clear()
    for number in range(max_rounds):
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=examples(max_examples), stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            ),
        )
        missing = [probe for probe in probes if machine.reached[probe] == 0]
        if number and not missing:
            return
    raise AssertionError(f"states never reached: {missing}; reached: {dict(machine.reached)}")


def test_engine_machine() -> None:
    run_rounds(EngineMachine, PROBES, 40)
