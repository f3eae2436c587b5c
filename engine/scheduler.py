"""Scheduler: decides which sequences run in the next step, with how many tokens, on which pages. Plain integers; computes no model, makes no text.

Policy. First come, first served. Every running sequence that has one token to compute (a decode row) goes first, then the others in order of
admission fill the step up to max_step_tokens, in chunks of at most max_chunk_tokens. A waiting sequence is admitted when the physical pages for
all its known tokens are there beside what running prefills still need (hits in the prefix cache are credited), and only in a step in which every
running sequence has a row: newcomers never take the context or the tokens that a running one waits for. A further sample of a request steps aside
while the first one still computes prompt pages that it will share. When running sequences need more pages than there are, the one admitted last is
preempted: its pages are released and it waits, first in line, to be computed again.

Look-ahead. A step may be planned while others are in flight (launched, not committed): positions are then counted from what is *planned*, and a token
that the device has sampled but the host has not read stands in the plan as `from_device(slot)`. Such a plan leaves out a sequence whose unread token
is its last or decides its next row (penalties), and it preempts nobody: with pages short, it waits for the step in flight. A sequence that ends while
a step in flight holds a row of it *departs*: it keeps its slot and its pages until that step is over, so no page is freed with a pending writer.

State. In a model that keeps states (limits.num_state_slots above 0) a running sequence also holds a state slot, and nobody is admitted without one.
A hit in the prefix cache is as long as a snapshot of a state lies behind sealed pages, and who was preempted goes on from one too (`keeping` says which
are taken). A chunk ends where a snapshot is wanted. Without snapshots (limits.num_snapshots 0) the prefix cache of such a model is off.

Why nothing starves: the sequence admitted first is never preempted while it fits alone, which `add` has checked, so it finishes; then the next
is first. Nobody is admitted while a running sequence goes without a row, so decode rows, which go first, end or make room for it. Why a step is never
empty while work is pending and nothing is in flight: some running sequence always gets a row, and if none runs, the first waiting one is admitted,
since then every page and every state slot is available.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.check import check_state, check_writes
from twinfer.engine.sequence import Sequence
from twinfer.engine.slots import I32
from twinfer.engine.waiting import WaitingLine
from twinfer.errors import LawViolation
from twinfer.plan import StepPlan
from twinfer.request import FinishReason


class Progress(NamedTuple):
    """What a committed step brought for one sequence: the new token (None for a chunk) and why it ended, if it did."""

    sequence: Sequence
    row: int
    token: int | None
    finish: FinishReason | None


class Scheduler(WaitingLine):
    """All decisions of one engine. `make(name)` gives host arrays from the ledger; `prefix_cache=False` never shares pages.

    Its slots are SlotTable's, rows are chosen among them by RowChoice, and WaitingLine stands in front; here they become a step, and what it brought.

    Invariants at each step boundary: a running sequence has a slot, slots are distinct, its page list covers its planned tokens,
    computed <= planned <= known and computed < known; a waiting one has neither slot nor pages; a departing one has both and no row to come.
    Without a step in flight, computed = planned, nobody departs and no token is unread.
    """

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._departing)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before a step in flight is over. Reserves pages; `delivered` moves positions."""
        preempted = False
        self.keeping.cancel()
        while True:
            slots, start, lengths = self._choose()
            missing = self._missing(slots, start, lengths)
            total = int(np.add.reduce(missing))
            if total <= self.pool.num_available:
                break
            if self.num_in_flight:
                return None  # somebody has to be preempted, who may have a row in flight
            self._preempt(self._running[-1])
            preempted = True
        if total:
            self._reserve(slots, missing)
        if self._waiting and not preempted and len(slots) == self._num_ready:
            slots, start, lengths = self._admit(slots, start, lengths)
        if len(slots) == 0:
            return None
        known = self._known[slots]
        copies = self.keeping.copies(slots, start, lengths, known, self._state_slot, self._by_slot)
        return self._rows.build(
            self._step, self._writer.delta(), self._order, slots, start, lengths, known, self._identity, self._scored, self._state_slot, copies
        )

    def delivered(self, plan: StepPlan) -> None:
        """The plan was handed to the executor (a refused one was not): its step is in flight."""
        self._writer.delivered()
        slots = plan.slot
        self._planned[slots] = plan.start + plan.length
        self._last_step[slots] = self._step
        sampling = slots if plan.num_samples is self._order.ones else slots[plan.num_samples > 0]
        self._known[sampling] += 1
        self._unread[sampling] += 1
        self._rows.await_tokens(sampling)
        self.states.launched(plan)
        self.keeping.launched(plan, self._by_slot)
        self._step += 1

    def commit(self, plan: StepPlan, tokens: I32, failed_rows: frozenset[int] = frozenset()) -> list[Progress]:
        """Moves positions after the executor finished `plan`: tokens [sum num_samples] int32. Rows in `failed_rows` have been dropped.

        Seals the pages that are now full and written, appends sampled tokens, and lets sequences that ended leave. Tokens of sequences that departed
        meanwhile are dropped.
        """
        sequences = [self._by_slot[slot] for slot in plan.slot.tolist()]
        alive = np.ones(plan.num_rows, np.bool_)
        alive[list(failed_rows)] = False
        for row, (sequence, identity) in enumerate(zip(sequences, plan.sequence.tolist(), strict=True)):
            if alive[row] and (sequence is None or sequence.id != identity):
                raise LawViolation("commit", f"slot {plan.slot[row]} does not hold sequence {identity} any more", (row,))
        for sequence in self._departing:
            alive[plan.slot == sequence.slot] = False
        self._over = plan.step
        drawn = alive & (plan.num_samples > 0)
        sampled = tokens[(np.cumsum(plan.num_samples) - plan.num_samples)[drawn]]
        self._advance(plan, alive)
        slots = plan.slot[drawn]
        self._unread[slots] -= 1
        self._rows.read_tokens(slots, sampled, self._unread[slots] == 0)
        next_token = iter(sampled.tolist())
        progress = []
        for row, (sequence, is_alive, has_token) in enumerate(zip(sequences, alive.tolist(), drawn.tolist(), strict=True)):
            if not is_alive or sequence is None:
                continue
            token, finish = None, None
            if has_token:
                token = next(next_token)
                sequence.append(token)
                num_generated = len(sequence.tokens) - sequence.num_prompt
                if token in sequence.end_tokens and num_generated > sequence.params.min_tokens:
                    finish = FinishReason.STOP
                elif num_generated >= sequence.max_new:
                    finish = FinishReason.LENGTH
            progress.append(Progress(sequence, row, token, finish))
        ended = [p.sequence for p in progress if p.finish is not None]
        for sequence in ended:
            self._leave(sequence)
        if ended:
            self._refresh()
        self._release_departed()
        return progress

    def failed(self, plan: StepPlan) -> None:
        """The step of `plan` is over without a result; all its rows have been dropped."""
        self._over = plan.step
        self.keeping.over(plan, {})
        self._release_departed()

    def _advance(self, plan: StepPlan, alive: NDArray[np.bool_]) -> None:
        """Moves the positions of the rows that are alive and seals their pages that are full now."""
        size = self.limits.page_size
        after = plan.start + plan.length
        self._computed[plan.slot[alive]] = after[alive]
        full = after // size
        for row in np.flatnonzero(alive & (plan.start // size != full)).tolist():
            sequence = self._sequence_at(int(plan.slot[row]))
            if sequence.use_cache:
                self._seal(sequence, int(plan.start[row]) // size, int(full[row]))
        if plan.restores.size or plan.saves.size:
            self.keeping.over(plan, {int(plan.state_slot[row]): self._sequence_at(int(plan.slot[row])) for row in np.flatnonzero(alive).tolist()})

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out for good (abort, error): frees their pages unsealed beyond what was sealed already, wherever they are.

        One with a row in flight departs: its pages are free when that step is over.
        """
        running = False
        for sequence in sequences:
            if sequence.slot >= 0:
                running = True
                self._leave(sequence)
            else:
                self._waiting.remove(sequence)
        if running:
            self._refresh()

    def distrust(self, plan: StepPlan, rows: Iterable[int]) -> None:
        """Takes back the seals of every page behind these rows of a plan, those that were found in the cache included, and forgets every snapshot: their
        logits were not numbers, so some key, value or state before may not be one, and whoever found it would fail for it.
        """
        for row in rows:
            for digest in self._sequence_at(int(plan.slot[row])).digests:
                self.keeping.pool.forget(digest)
            for page in self.table.page_list(int(plan.slot[row])).tolist():
                if self.pool.sealed[page]:
                    self.pool.unseal(page)

    def abandon(self) -> None:
        """Forgets every sequence and every page, cached ones too: the executor is lost and its cache with it. Needs no consistent state."""
        self._waiting.clear()
        self._over = self._step - 1
        self._clear_slots()

    # ---- looking on ----------------------------------------------------------------------------------------------------------

    def sequences_of(self, plan: StepPlan, rows: Iterable[int]) -> list[Sequence]:
        """The running sequences behind rows of a plan; those that have departed are left out."""
        found = [self._sequence_at(int(plan.slot[row])) for row in rows]
        return [sequence for sequence in found if sequence not in self._departing]

    def check_plan(self, plan: StepPlan) -> None:
        """Raises LawViolation unless every page that the plan writes belongs to its row alone and is not sealed (exhaustive)."""
        check_writes(self, plan)

    def check(self) -> None:
        """Raises LawViolation unless pages, slots and positions are consistent (exhaustive: for audit mode and tests)."""
        check_state(self)
