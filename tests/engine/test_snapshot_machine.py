"""The same random traffic for a model that keeps states and snapshots of them: prompts of grid-sized chunks, small pools, look-ahead. Ghost executor.

Every copy is watched: what a step saves, why, and who goes on from it. The ghost tells a state of another history at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from twinfer.engine.sequence import Sequence
from twinfer.limits import Limits, ceil_div
from twinfer.plan import StepPlan

from .test_machine import SOME_STEPS, EngineMachine, run_rounds

SNAPSHOT_PROBES = (
    "prefix_hit",
    "preempted",
    "evicted",
    "step_failed",
    "row_refused",
    "planned_ahead",
    "row_of_a_sample_that_has_ended",
    "second_turn_hits_answer",
    "samples_share_the_prompt",
    "abort_running",
    "snapshot_hit",
    "snapshot_evicted",
    "snapshot_forgotten_with_its_page",
    "prompt_end_hit",
    "branch_hit",
    "interval_hit",
    "second_turn_hit",
    "passing_one_gave_way",
    "restored_after_preemption",
    "several_restored_from_one",
    "hit_while_its_maker_runs",
    "restored_while_another_step_runs",
    "saved_while_another_step_runs",
    "save_of_a_failed_step",
    "save_of_a_sample_that_has_ended",
    "restore_planned_again",
    "all_pinned",
    "saved_and_restored_in_one_step",
    "two_equal_ones_saved",
    "chunk_ended_for_a_snapshot",
    "off_without_cache",
)


@st.composite
def snapshot_limits(draw: st.DrawFn) -> Limits:
    """Contexts of a few grid points; pages that divide 64 or are a multiple of it; a pool that holds one context and hardly more."""
    page_size = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 64, 128]))
    grid = max(64, page_size)
    max_batch = draw(st.integers(1, 4))
    max_step_tokens = draw(st.sampled_from([grid // 2 + 3, grid, 2 * grid, 3 * grid + 5]))
    max_context = draw(st.integers(2 * grid, 4 * grid))
    one = ceil_div(max_context, page_size)
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max(max_step_tokens, max_batch),
        max_chunk_tokens=draw(st.sampled_from([max_step_tokens, max_step_tokens // 2 + 1])),
        warmup_tokens=1,
        max_context=max_context,
        max_step_context=draw(st.just(max_context) | st.just(max_batch * max_context)),
        max_logit_tokens=4,
        page_size=page_size,
        num_pages=draw(st.integers(one, one + max(one // 2, 1)) | st.integers(one, one * max_batch)),
        num_state_slots=draw(st.integers(1, max_batch + 1)),
        num_snapshots=draw(st.sampled_from([0, 1, 2, 3, 8, 8, 8, 40])),
        snapshot_interval=draw(st.sampled_from([grid, grid, 2 * grid, 8192])),
        look_ahead=draw(st.sampled_from([0, 0, 1, 2])),
        max_logprobs=2,
    )


class SnapshotMachine(EngineMachine):
    """One engine with states and snapshots under random traffic."""

    reached: ClassVar[Counter[str]] = Counter()
    most_steps: ClassVar[int] = 20_000

    @initialize(limits=snapshot_limits(), prefix_cache=st.sampled_from([True] * 7 + [False]))
    def start(self, limits: Limits, prefix_cache: bool) -> None:  # type: ignore[override]
        self._start(limits, prefix_cache)
        self.why: dict[int, tuple[str, int]] = {}  # by snapshot: why it was taken last, and by which sequence
        self.grid = limits.snapshot_grid
        pool, reached = self.engine.scheduler.keeping.pool, self.reached
        take, keep, pass_by, forget = pool.take, pool.keep, pool.pass_by, self.engine.scheduler._forget

        def watched_take(length: int, passing: bytes | None = None) -> int:
            evicted = pool.num_evictions
            taken = take(length, passing)
            reached["snapshot_evicted"] += pool.num_evictions > evicted
            reached["all_pinned"] += taken < 0
            return taken

        def watched_keep(snapshot: int, key: bytes, passing: bool) -> None:
            reached["two_equal_ones_saved"] += pool.find(key) >= 0
            keep(snapshot, key, passing)

        def watched_pass_by(key: bytes) -> None:
            before = len(pool.keys())
            pass_by(key)
            reached["passing_one_gave_way"] += len(pool.keys()) < before

        def watched_forget(page: int) -> None:
            before = len(pool.keys())
            forget(page)
            reached["snapshot_forgotten_with_its_page"] += len(pool.keys()) < before

        keeping = self.engine.scheduler.keeping
        copies, launched, planned = keeping.copies, keeping.launched, set[tuple[int, ...]]()

        def watched_copies(*given: Any) -> Any:
            found = copies(*given)
            pairs = {tuple(pair) for pair in found[0].tolist()}
            reached["restore_planned_again"] += bool(planned & pairs)
            planned.update(pairs)
            return found

        def watched_launched(*given: Any) -> None:
            planned.clear()
            launched(*given)

        keeping.copies, keeping.launched = watched_copies, watched_launched  # type: ignore[method-assign]
        pool.take, pool.keep, pool.pass_by = watched_take, watched_keep, watched_pass_by  # type: ignore[method-assign]
        self.engine.scheduler.pool._on_evict = watched_forget

    def _chunk(self) -> int:
        return self.grid

    def _add(self, prompt: list[int], max_tokens: int, kit: dict[str, Any]) -> int | None:
        """Every third prompt ends just before a point of the grid, and now and then a request of one sample writes enough to pass the next one too."""
        if max_tokens % 3 == 0:
            prompt = (prompt + [prompt[-1]] * (-(len(prompt) + 2) % self.grid))[: self.limits.max_context - 1]
            max_tokens += self.grid if not max_tokens % 2 and not kit else 0
        return super()._add(prompt, max_tokens, kit if kit.get("max_tokens", 1) else {})

    @precondition(lambda self: self._long())
    @rule(which=st.integers(0, 10**6), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3), count=SOME_STEPS)
    def turn_after_a_long_answer(self, which: int, tail: list[int], count: int) -> None:
        """The next turn of a request whose answer has a point of the grid in it: chance alone seldom takes one."""
        before, num_prompt = (found := self._long())[which % len(found)]
        request_id = self._add([*before, *tail], 1, {})
        if request_id is not None:
            self.second_turn[request_id] = num_prompt
        self._steps(count)

    def _long(self) -> list[tuple[tuple[int, ...], int]]:
        most, grid = self.limits.max_context - 4, self.grid
        return [(whole, prompt) for whole, prompt in self.finished if len(whole) < most and (len(whole) - 1) // grid > prompt // grid]

    @precondition(lambda self: self.finished and self.engine.scheduler.num_running)
    @rule(which=st.integers(0, 10**6))
    def refuse_a_row_beside_a_hit(self, which: int) -> None:
        """A finished prompt comes again, and the step in which it would go on from a snapshot is refused for another row."""
        running = self.engine.scheduler.running()
        whole, num_prompt = self.finished[which % len(self.finished)]
        self._add(list(whole[:num_prompt]), 1, {})
        self._refuse_a_row(running[which % len(running)])

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        reached, scheduler = self.reached, self.engine.scheduler
        row_of = {state: row for row, state in enumerate(plan.state_slot.tolist())}
        running = {s.id: s for s in scheduler.running()}
        ahead = scheduler.num_in_flight > 1  # this one has been counted already
        reached["saved_while_another_step_runs"] += ahead and bool(plan.saves.size)
        reached["restored_while_another_step_runs"] += ahead and bool(plan.restores.size)
        reached["saved_and_restored_in_one_step"] += bool(plan.saves.size and plan.restores.size)
        reached["several_restored_from_one"] += len(set(plan.restores[:, 0].tolist())) < len(plan.restores)
        if not scheduler.prefix_cache:
            assert not plan.saves.size
            assert not plan.restores.size
            reached["off_without_cache"] += 1
        for snapshot, state in plan.restores.tolist():
            self._probe_restore(plan, row_of[state], *self.why[snapshot], running)
        for state, snapshot in plan.saves.tolist():
            row = row_of[state]
            self.why[snapshot] = (self._reason(plan, row, running), int(plan.sequence[row]))
            reached["chunk_ended_for_a_snapshot"] += not plan.num_samples[row]

    def _probe_restore(self, plan: StepPlan, row: int, why: str, maker: int, running: dict[int, Sequence]) -> None:
        sequence, start, reached = int(plan.sequence[row]), int(plan.start[row]), self.reached
        reached["snapshot_hit"] += 1
        reached[f"{why}_hit"] += 1
        request = self.sample_of[sequence][0]
        reached["second_turn_hit"] += why == "passing" and start > self.second_turn.get(request, self.limits.max_context)
        reached["restored_after_preemption"] += running[sequence].num_preemptions > 0
        reached["hit_while_its_maker_runs"] += maker in running and maker != sequence

    def _reason(self, plan: StepPlan, row: int, running: dict[int, Sequence]) -> str:
        """Why a row's state is saved, by where it ends; a row that nobody told us of in `points` would be none of these."""
        end, sequence = int(plan.start[row] + plan.length[row]), running[int(plan.sequence[row])]
        if plan.num_samples[row]:
            return "passing"
        last = (len(sequence.tokens) - 1) // self.grid * self.grid
        if end == last:
            return "prompt_end"
        return "interval" if end % (ceil_div(self.limits.snapshot_interval, self.grid) * self.grid) == 0 else "branch"

    def _step(self) -> None:
        saved = [plan for plan in self.engine.in_flight if plan.saves.size]
        dead = {s.id for s in self.engine.scheduler.departing()}
        failed = self.reached["step_failed"]
        super()._step()
        over = [plan for plan in saved if plan not in self.engine.in_flight]
        self.reached["save_of_a_failed_step"] += self.reached["step_failed"] > failed and bool(over or any(plan.saves.size for plan in self.plans))
        self.reached["save_of_a_sample_that_has_ended"] += any(
            int(sequence) in dead for plan in over for sequence in plan.sequence[_rows(plan)].tolist()
        )


def _rows(plan: StepPlan) -> Any:
    """Rows whose state is saved."""
    slots = set(plan.saves[:, 0].tolist())
    return [row for row, state in enumerate(plan.state_slot.tolist()) if state in slots]


def test_snapshot_machine() -> None:
    run_rounds(SnapshotMachine, SNAPSHOT_PROBES, 30)
