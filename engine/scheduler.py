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

Why nothing starves: the sequence admitted first is never preempted while it fits alone, which `add` has checked, so it finishes; then the next
is first. Nobody is admitted while a running sequence goes without a row, so decode rows, which go first, end or make room for it. Why a step is never
empty while work is pending and nothing is in flight: some running sequence always gets a row, and if none runs, the first waiting one is admitted,
since then every page is available.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.admission import max_new_tokens
from twinfer.engine.check import check_state, check_writes
from twinfer.engine.columns import SlotColumns
from twinfer.engine.order import Order
from twinfer.engine.pages import PagePool
from twinfer.engine.prefix import PrefixCache
from twinfer.engine.rows import RowBuilder
from twinfer.engine.sequence import Sequence
from twinfer.engine.tables import TableWriter
from twinfer.errors import LawViolation
from twinfer.invariants.facts import PageState, SlotState
from twinfer.limits import Limits, ceil_div
from twinfer.plan import PLAIN_FORMAT, StepPlan
from twinfer.request import FinishReason, Request
from twinfer.table import PageTable

I32 = NDArray[np.int32]
NOBODY = -1  # the identity of a slot that is free


class Progress(NamedTuple):
    """What a committed step brought for one sequence: the new token (None for a chunk) and why it ended, if it did."""

    sequence: Sequence
    row: int
    token: int | None
    finish: FinishReason | None


class Scheduler:
    """All decisions of one engine. `make(name)` gives host arrays from the ledger; `prefix_cache=False` never shares pages.

    Invariants at each step boundary: a running sequence has a slot, slots are distinct, its page list covers its planned tokens,
    computed <= planned <= known and computed < known; a waiting one has neither slot nor pages; a departing one has both and no row to come.
    Without a step in flight, computed = planned, nobody departs and no token is unread.
    """

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]], prefix_cache: bool = True) -> None:
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.prefix = PrefixCache(limits.page_size)
        self.pool = PagePool(limits.num_pages, make("page_references"), make("page_sealed"), self.prefix.forget)
        self.table = PageTable(make("page_table"), make("page_counts"))
        self._writer = TableWriter(self.table)
        self._columns = SlotColumns(make)
        self._computed: I32 = make("computed")  # tokens in cache by committed steps
        self._planned: I32 = make("planned")  # the same when every launched step is over
        self._known: I32 = make("known")  # tokens known when every launched step is over
        self._limit: I32 = make("known_limit")  # tokens that the sequence may ever know
        self._unread: I32 = make("unread")  # tokens sampled by launched steps that are not committed
        self._last_step: NDArray[np.int64] = make("last_step")  # number of the last launched step with a row of the slot
        self._needs_host: NDArray[np.bool_] = make("needs_host")  # whether the next row depends on tokens that the host must have read
        self._identity: NDArray[np.int64] = make("identity")
        self._identity[:] = NOBODY
        self._scored: I32 = make("scored_logprobs")
        self._by_slot: list[Sequence | None] = [None] * limits.max_batch
        self._rows = RowBuilder(make, self._by_slot, self._columns)
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._running: list[Sequence] = []  # admitted first to last
        self._departing: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._num_ready = 0  # running sequences that the last `_choose` could have given a row
        self._refresh()
        self._next_id = 0
        self._step = 0  # number of the next step to launch
        self._over = -1  # number of the last step that is over
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # ---- requests ------------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Launched steps that are not over."""
        return self._step - 1 - self._over

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._departing)

    def add(
        self, request: Request, request_id: int, sample: int, seed: int, end_tokens: frozenset[int], leader: Sequence | None = None
    ) -> Sequence:
        """Queues one sample of a request; `leader` is the request's first sample, for the others. Raises RequestRefused when it can never fit."""
        params = request.sampling
        sequence = Sequence(
            id=self._next_id,
            request_id=request_id,
            sample=sample,
            params=params,
            seed=seed,
            num_prompt=len(request.prompt),
            max_new=max_new_tokens(request, self.limits),
            end_tokens=end_tokens,
            root=self.prefix.root(request.cache_salt, PLAIN_FORMAT),
            use_cache=self.prefix_cache and params.prompt_logprobs is None,
            tokens=array("i", request.prompt),
            leader=leader,
            keeps_seen=params.has_penalties,
            seen=dict.fromkeys(request.prompt, 0) if params.has_penalties else {},
        )
        self._next_id += 1
        self._waiting.append(sequence)
        return sequence

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences out for good (abort, error): frees their pages unsealed beyond what was sealed already, wherever they are.

        One with a row in flight departs: its pages are free when that step is over.
        """
        for sequence in sequences:
            if sequence.slot >= 0:
                self._leave(sequence)
            else:
                self._waiting.remove(sequence)
        self._refresh()

    def abandon(self) -> None:
        """Forgets every sequence and every page, cached ones too: the executor is lost and its cache with it. Needs no consistent state."""
        for sequence in (*self._running, *self._departing):
            sequence.slot = -1
        self._running.clear()
        self._departing.clear()
        self._waiting.clear()
        self._by_slot[:] = [None] * self.limits.max_batch
        self._identity[:] = NOBODY
        self._free_slots = list(range(self.limits.max_batch - 1, -1, -1))
        self._over = self._step - 1
        self.prefix.clear()
        self.pool.reset()
        for slot in range(self.limits.max_batch):
            self._writer.clear(slot)
            self._columns.clear(slot)
        self._refresh()

    # ---- one step ------------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before a step in flight is over. Reserves pages; `delivered` moves positions."""
        preempted = False
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
        return self._rows.build(self._step, self._writer.delta(), self._order, slots, start, lengths, self._known[slots], self._identity, self._scored)

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

    # ---- choosing rows -------------------------------------------------------------------------------------------------------

    def _choose(self) -> tuple[I32, I32, I32]:
        """Slots, first positions and lengths of the running sequences' rows within the limits, decode rows first, each kind in order of admission."""
        limits, order = self.limits, self._order
        slots = order.slots
        if self.num_in_flight:
            # The unread token is the last one, or the next row depends on it.
            blocked = (self._known[slots] >= self._limit[slots]) | (self._needs_host[slots] & (self._unread[slots] > 0))
            if blocked.any():
                slots = slots[~blocked]
        self._num_ready = len(slots)
        start = self._planned[slots]
        lengths: I32 = self._known[slots] - start
        decode = lengths == 1
        if not decode.all():
            by_kind = np.argsort(~decode, kind="stable")
            slots, start, lengths = slots[by_kind], start[by_kind], np.minimum(lengths[by_kind], limits.max_chunk_tokens)
            before = np.cumsum(lengths) - lengths
            lengths = np.minimum(lengths, (limits.max_step_tokens - before).clip(0)).astype(np.int32)  # cumsum gives int64
        elif int(np.add.reduce(start, dtype=np.int64)) + len(slots) <= limits.max_step_context:
            return slots, start, order.ones if slots is order.slots else lengths  # the steady state: all decode and all fit
        # Contexts beyond the step's limit: the first row over it is shortened to what is left, those after it wait. A context is at most
        # max_context <= max_step_context, so the very first row always stays.
        reach = np.cumsum(start + lengths, dtype=np.int64)
        over = int(np.searchsorted(reach, limits.max_step_context, side="right"))
        if over < len(slots):
            lengths[over] = max(0, int(lengths[over]) - (int(reach[over]) - limits.max_step_context))
            lengths[over + 1 :] = 0
        keep = lengths > 0
        return slots[keep], start[keep], lengths[keep]

    def _missing(self, slots: I32, start: I32, lengths: I32) -> I32:
        """Pages that each row lacks."""
        size, held = self.limits.page_size, self.table.num_pages[slots]
        if lengths is self._order.ones:  # one token a row lacks a page where the page list is full
            full: I32 = (start == held * size).view(np.int8).astype(np.int32)
            return full
        missing: I32 = -(-(start + lengths) // size) - held
        return np.maximum(missing, 0, out=missing)

    def _reserve(self, slots: I32, missing: I32) -> None:
        """Gives each row the pages that it lacks; the caller has checked that they are there."""
        need = missing > 0
        slots, counts = slots[need], missing[need]
        pages = self.pool.allocate(int(counts.sum()))
        if len(pages) == len(slots):
            self._writer.append_one_each(slots, pages)
            return
        at = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self._writer.append(slot, pages[at : at + count])
            at += count

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._refresh()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)

    # ---- admission -----------------------------------------------------------------------------------------------------------

    def _admit(self, slots: I32, start: I32, lengths: I32) -> tuple[I32, I32, I32]:
        """Adds rows for waiting sequences, first come first served, while slots, tokens, contexts and pages last.

        A sequence that awaits its leader is stepped over; one that lacks pages is not, else it would be overtaken for ever.
        """
        limits, size = self.limits, self.limits.page_size
        tokens_left = limits.max_step_tokens - int(lengths.sum())
        context_left = limits.max_step_context - int((start + lengths).sum(dtype=np.int64))
        running = self._order.slots
        owed = int((-(-self._known[running] // size) - self.table.num_pages[running]).clip(0).sum())  # pages that running prefills still need
        new_slots, new_lengths = [], []
        at = 0
        while at < len(self._waiting) and self._free_slots and tokens_left > 0:
            sequence = self._waiting[at]
            if self._awaits_leader(sequence):
                at += 1
                continue
            known = len(sequence.tokens)
            hits = self._match(sequence)
            cached = len(hits) * size
            length = min(known - cached, limits.max_chunk_tokens, tokens_left, context_left - cached)
            unreferenced = sum(1 for page in hits if self.pool.references[page] == 0)
            total = ceil_div(known, size) - len(hits)
            if length < 1 or total + unreferenced + owed > self.pool.num_available:
                break
            del self._waiting[at]
            slot = self._enter(sequence, hits)
            now = ceil_div(cached + length, size) - len(hits)
            self._writer.append(slot, self.pool.allocate(now))
            owed += total - now
            tokens_left -= length
            context_left -= cached + length
            new_slots.append(slot)
            new_lengths.append(length)
        if not new_slots:
            return slots, start, lengths
        self._refresh()
        new = np.array(new_slots, np.int32)
        lengths = np.concatenate([lengths, np.array(new_lengths, np.int32)])
        return np.concatenate([slots, new]), np.concatenate([start, self._planned[new]]), lengths

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Whether the first sample of the same request is still computing prompt pages that this one will share."""
        leader = sequence.leader
        if leader is None or leader.slot < 0 or not (sequence.use_cache and leader.use_cache):
            return False
        size = self.limits.page_size
        return int(self._computed[leader.slot]) < (sequence.num_prompt - 1) // size * size

    def _match(self, sequence: Sequence) -> list[int]:
        """Sealed pages that hold the beginning of the sequence; at least one known token is left to compute."""
        if not sequence.use_cache:
            return []
        limit = (len(sequence.tokens) - 1) // self.limits.page_size
        self._digest(sequence, limit)
        return self.prefix.match(sequence.digests[:limit])

    def _digest(self, sequence: Sequence, num_pages: int) -> None:
        """Extends the sequence's digests to its first `num_pages` full pages."""
        size, digests = self.limits.page_size, sequence.digests
        for i in range(len(digests), num_pages):
            before = digests[-1] if digests else sequence.root
            digests.append(self.prefix.extend(before, sequence.tokens[i * size : (i + 1) * size].tobytes()))

    def _enter(self, sequence: Sequence, hits: list[int]) -> int:
        """Gives a waiting sequence a slot, with the hit pages at the beginning of its page list."""
        slot = self._free_slots.pop()
        cached = len(hits) * self.limits.page_size
        if sequence.use_cache:
            self.num_prefix_queries += len(sequence.tokens)
            self.num_prefix_hits += cached
        if sequence.num_preemptions == 0:
            sequence.num_cached = cached
        sequence.slot = slot
        self.pool.share(hits)
        self._writer.clear(slot)
        self._writer.append(slot, hits)
        self._by_slot[slot] = sequence
        self._running.append(sequence)
        self._computed[slot] = self._planned[slot] = cached
        self._known[slot] = len(sequence.tokens)
        self._limit[slot] = sequence.num_prompt + sequence.max_new
        self._unread[slot] = 0
        self._last_step[slot] = -1
        self._needs_host[slot] = sequence.keeps_seen
        self._rows.enter(slot, sequence)
        self._identity[slot] = sequence.id
        scored = sequence.params.prompt_logprobs
        self._scored[slot] = -1 if scored is None else scored
        self._columns.set(slot, sequence)
        return slot

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence off the order; its slot and pages are released, now or when its last step in flight is over."""
        self._running.remove(sequence)
        if self._last_step[sequence.slot] > self._over:
            self._departing.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Frees a slot and its pages; sealed ones stay in the cache."""
        slot = sequence.slot
        self.pool.release(self.table.page_list(slot).tolist())
        self._writer.clear(slot)
        self._columns.clear(slot)
        self._by_slot[slot] = None
        self._identity[slot] = NOBODY
        self._free_slots.append(slot)
        sequence.slot = -1

    def _release_departed(self) -> None:
        for sequence in [s for s in self._departing if self._last_step[s.slot] <= self._over]:
            self._departing.remove(sequence)
            self._release(sequence)

    def _refresh(self) -> None:
        self._order = Order.of([s.slot for s in self._running], self._identity, self._scored)

    def _seal(self, sequence: Sequence, first: int, end: int) -> None:
        """Makes pages first..end-1 of the sequence findable: all their tokens are computed, so their keys and values are written."""
        self._digest(sequence, end)
        pages = self.table.page_list(sequence.slot)
        for i in range(first, end):
            page = int(pages[i])
            if self.prefix.seal(page, sequence.digests[i]):
                self.pool.seal(page)

    def _sequence_at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None, f"slot {slot} is taken"
        return sequence

    # ---- looking on ----------------------------------------------------------------------------------------------------------

    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, admitted first to last."""
        return tuple(self._running)

    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences, next first."""
        return tuple(self._waiting)

    def departing(self) -> tuple[Sequence, ...]:
        """Sequences that have ended and keep their pages until their last step in flight is over."""
        return tuple(self._departing)

    def free_slots(self) -> tuple[int, ...]:
        """Batch slots that nobody has."""
        return tuple(self._free_slots)

    @property
    def slot_state(self) -> SlotState:
        """What the auditor compares rows with: the very columns, as they are now and later."""
        return SlotState(self._identity, self._planned, self._known, self._unread)

    @property
    def page_state(self) -> PageState:
        """The same of the pool's pages."""
        return PageState(self.pool.references, self.pool.sealed)

    def position(self, sequence: Sequence) -> tuple[int, int, int, int]:
        """(computed, planned, known, unread) of a sequence that has a slot."""
        return tuple(int(column[sequence.slot]) for column in (self._computed, self._planned, self._known, self._unread))  # type: ignore[return-value]

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
