"""Scheduler: decides which sequences run in the next step, with how many tokens, on which pages. Plain integers; computes no model, makes no text.

Policy. First come, first served. Every running sequence that has one token to compute (a decode row) goes first, then the others in order of
admission fill the step up to max_step_tokens, in chunks of at most max_chunk_tokens. A waiting sequence is admitted when the physical pages for
all its known tokens are there beside what running prefills still need (hits in the prefix cache are credited), and only in a step in which every
running sequence has a row: newcomers never take the context or the tokens that a running one waits for. When running sequences need more
pages than there are, the one admitted last is preempted: its pages are released and it waits, first in line, to be computed again.

Why nothing starves: the sequence admitted first is never preempted while it fits alone, which `add` has checked, so it finishes; then the next
is first. Nobody is admitted while a running sequence goes without a row, so decode rows, which go first, end or make room for it. Why a step is never
empty while work is pending: some running sequence always gets a row, and if none runs, the first waiting one is admitted, since then every page
is available.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.columns import SlotColumns
from twinfer.engine.pages import PagePool
from twinfer.engine.prefix import PrefixCache
from twinfer.engine.sequence import Sequence
from twinfer.engine.tables import TableWriter
from twinfer.errors import LawViolation, RequestRefused
from twinfer.limits import Limits, ceil_div
from twinfer.plan import PLAIN_FORMAT, StepPlan
from twinfer.request import FinishReason, Request
from twinfer.table import PageTable

I32 = NDArray[np.int32]
_NO_TOKENS = np.empty(0, np.int32)


class Progress(NamedTuple):
    """What a committed step brought for one sequence: the new token (None for a chunk) and why it ended, if it did."""

    sequence: Sequence
    row: int
    token: int | None
    finish: FinishReason | None


class Scheduler:
    """All decisions of one engine. `make(name)` gives host arrays from the ledger; `prefix_cache=False` never shares pages.

    Invariants at each step boundary: a running sequence has a slot, slots are distinct, its page list covers its computed tokens,
    computed < known; a waiting one has neither slot nor pages.
    """

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]], prefix_cache: bool = True) -> None:
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.prefix = PrefixCache(limits.page_size)
        self.pool = PagePool(limits.num_pages, make("page_references"), self.prefix.forget)
        self.table = PageTable(make("page_table"), make("page_counts"))
        self._writer = TableWriter(self.table)
        self._columns = SlotColumns(make)
        self._computed: I32 = make("computed")
        self._known: I32 = make("known")
        self._last_token: I32 = make("last_token")
        self._identity: NDArray[np.int64] = make("identity")
        self._scored: I32 = make("scored_logprobs")
        # Read-only columns that most plans share: nothing scored, no state slot.
        self._zeros: I32 = make("zeros")
        self._no_state: I32 = make("no_state")
        self._no_state[:] = -1
        self._by_slot: list[Sequence | None] = [None] * limits.max_batch
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._order: list[Sequence] = []  # running, admitted first to last
        self._order_slots: I32 = _NO_TOKENS
        self._waiting: deque[Sequence] = deque()
        self._next_id = 0
        self._step = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # ---- requests ------------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._order)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._order or self._waiting)

    def max_new_tokens(self, request: Request) -> int:
        """Tokens that the request may generate; refuses what can never fit: the context's limit, then the pool's pages.

        The last generated token is never computed, so a request holds at most prompt + max_tokens - 1 tokens in pages.
        """
        limits, num_prompt, asked = self.limits, len(request.prompt), request.params.max_tokens
        if num_prompt > limits.max_context:
            raise RequestRefused("prompt", f"{num_prompt} tokens", f"at most max_context = {limits.max_context} tokens")
        pool_tokens = limits.num_pages * limits.page_size
        if num_prompt > pool_tokens:
            raise RequestRefused("prompt", f"{num_prompt} tokens", f"at most {pool_tokens} tokens, all that {limits.num_pages} pages hold")
        room = self.room(num_prompt)
        if asked is None:
            asked = room
        if num_prompt + asked > limits.max_context or room < 1:
            raise RequestRefused(
                "max_tokens", request.params.max_tokens, f"at most max_context - prompt = {limits.max_context} - {num_prompt} tokens"
            )
        if asked > room:
            raise RequestRefused(
                "max_tokens", asked, f"at most {room}, what {limits.num_pages} pages of {limits.page_size} hold beside {num_prompt} prompt tokens"
            )
        return asked

    def room(self, num_prompt: int) -> int:
        """Tokens that may be generated after a prompt: what the context leaves, and what all pages hold (the last token needs no page)."""
        limits = self.limits
        return min(limits.max_context - num_prompt, limits.num_pages * limits.page_size - num_prompt + 1)

    def add(
        self, request: Request, request_id: int, sample: int, seed: int, end_tokens: frozenset[int], leader: Sequence | None = None
    ) -> Sequence:
        """Queues one sample of a request; `leader` is the request's first sample, for the others. Raises RequestRefused when it can never fit."""
        params = request.params
        sequence = Sequence(
            id=self._next_id,
            request_id=request_id,
            sample=sample,
            params=params,
            seed=seed,
            num_prompt=len(request.prompt),
            max_new=self.max_new_tokens(request),
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
        """Takes sequences out for good (abort, error): frees their pages unsealed beyond what was sealed already, wherever they are."""
        for sequence in sequences:
            if sequence.slot >= 0:
                self._leave(sequence)
            else:
                self._waiting.remove(sequence)
        self._refresh()

    def abandon(self) -> None:
        """Forgets every sequence and every page, cached ones too: the executor is lost and its cache with it. Needs no consistent state."""
        for sequence in self._order:
            sequence.slot = -1
        self._order.clear()
        self._waiting.clear()
        self._by_slot = [None] * self.limits.max_batch
        self._free_slots = list(range(self.limits.max_batch - 1, -1, -1))
        self.prefix.clear()
        self.pool.reset()
        for slot in range(self.limits.max_batch):
            self._writer.clear(slot)
            self._columns.clear(slot)
        self._refresh()

    # ---- one step ------------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do. Reserves pages; positions move only in `commit`."""
        preempted = False
        while True:
            slots, start, lengths = self._choose()
            missing = -(-(start + lengths) // self.limits.page_size) - self.table.num_pages[slots]
            np.maximum(missing, 0, out=missing)
            total = int(np.add.reduce(missing))
            if total <= self.pool.num_available:
                break
            self._preempt(self._order[-1])
            preempted = True
        if total:
            self._reserve(slots, missing)
        if self._waiting and not preempted and len(slots) == len(self._order):
            slots, start, lengths = self._admit(slots, start, lengths)
        if len(slots) == 0:
            return None
        return self._build(slots, start, lengths)

    def delivered(self) -> None:
        """The last plan was handed to the executor (a refused one was not)."""
        self._writer.delivered()
        self._step += 1

    def commit(self, plan: StepPlan, tokens: I32, failed_rows: frozenset[int] = frozenset()) -> list[Progress]:
        """Moves positions after the executor finished `plan`: tokens [sum num_samples] int32. Rows in `failed_rows` have been dropped.

        Seals the pages that are now full and written, appends sampled tokens, and lets sequences that ended leave.
        """
        alive = np.ones(plan.num_rows, np.bool_)
        alive[list(failed_rows)] = False
        sequences = [self._by_slot[slot] for slot in plan.slot.tolist()]
        for row, (sequence, identity) in enumerate(zip(sequences, plan.request.tolist(), strict=True)):
            if alive[row] and (sequence is None or sequence.id != identity):
                raise LawViolation("commit", f"slot {plan.slot[row]} does not hold sequence {identity} any more", (row,))
        drawn = alive & (plan.num_samples > 0)
        sampled = tokens[(np.cumsum(plan.num_samples) - plan.num_samples)[drawn]]
        self._advance(plan, alive)
        self._known[plan.slot[drawn]] += 1
        self._last_token[plan.slot[drawn]] = sampled
        next_token = iter(sampled.tolist())
        progress, left = [], False
        for row, (sequence, has_token) in enumerate(zip(sequences, drawn.tolist(), strict=True)):
            if row in failed_rows or sequence is None:
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
                if finish is not None:
                    self._leave(sequence)
                    left = True
            progress.append(Progress(sequence, row, token, finish))
        if left:
            self._refresh()
        return progress

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
        limits, slots = self.limits, self._order_slots
        start = self._computed[slots]
        lengths = self._known[slots] - start
        decode = lengths == 1
        if not decode.all():
            order = np.argsort(~decode, kind="stable")
            slots, start, lengths = slots[order], start[order], np.minimum(lengths[order], limits.max_chunk_tokens)
            before = np.cumsum(lengths) - lengths
            lengths = np.minimum(lengths, (limits.max_step_tokens - before).clip(0)).astype(np.int32)  # cumsum gives int64
        elif int(np.add.reduce(start, dtype=np.int64)) + len(slots) <= limits.max_step_context:
            return slots, start, lengths  # the steady state: all decode and all fit
        # Contexts beyond the step's limit: the first row over it is shortened to what is left, those after it wait. A context is at most
        # max_context <= max_step_context, so the very first row always stays.
        reach = np.cumsum(start + lengths, dtype=np.int64)
        over = int(np.searchsorted(reach, limits.max_step_context, side="right"))
        if over < len(slots):
            lengths[over] = max(0, int(lengths[over]) - (int(reach[over]) - limits.max_step_context))
            lengths[over + 1 :] = 0
        keep = lengths > 0
        return slots[keep], start[keep], lengths[keep]

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
        """Adds rows for waiting sequences, first come first served, while slots, tokens, contexts and pages last."""
        limits, size = self.limits, self.limits.page_size
        tokens_left = limits.max_step_tokens - int(lengths.sum())
        context_left = limits.max_step_context - int((start + lengths).sum(dtype=np.int64))
        running = self._order_slots
        owed = int((-(-self._known[running] // size) - self.table.num_pages[running]).clip(0).sum())  # pages that running prefills still need
        new_slots, new_lengths = [], []
        while self._waiting and self._free_slots and tokens_left > 0:
            sequence = self._waiting[0]
            if self._awaits_leader(sequence):
                break
            known = len(sequence.tokens)
            hits = self._match(sequence)
            cached = len(hits) * size
            length = min(known - cached, limits.max_chunk_tokens, tokens_left, context_left - cached)
            unreferenced = sum(1 for page in hits if self.pool.references[page] == 0)
            total = ceil_div(known, size) - len(hits)
            if length < 1 or total + unreferenced + owed > self.pool.num_available:
                break
            self._waiting.popleft()
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
        return np.concatenate([slots, new]), np.concatenate([start, self._computed[new]]), lengths

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
        self._order.append(sequence)
        self._computed[slot] = cached
        self._known[slot] = len(sequence.tokens)
        self._last_token[slot] = sequence.tokens[-1]
        self._identity[slot] = sequence.id
        scored = sequence.params.prompt_logprobs
        self._scored[slot] = -1 if scored is None else scored
        self._columns.set(slot, sequence)
        return slot

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence off its slot and releases its pages; sealed ones stay in the cache."""
        slot = sequence.slot
        self.pool.release(self.table.page_list(slot).tolist())
        self._writer.clear(slot)
        self._columns.clear(slot)
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        self._order.remove(sequence)
        sequence.slot = -1

    def _refresh(self) -> None:
        self._order_slots = np.array([s.slot for s in self._order], np.int32)

    def _seal(self, sequence: Sequence, first: int, end: int) -> None:
        """Makes pages first..end-1 of the sequence findable: all their tokens are computed, so their keys and values are written."""
        self._digest(sequence, end)
        pages = self.table.page_list(sequence.slot)
        for i in range(first, end):
            page = int(pages[i])
            if self.prefix.seal(page, sequence.digests[i]):
                self.pool.seal(page)

    # ---- building ------------------------------------------------------------------------------------------------------------

    def _build(self, slots: I32, start: I32, lengths: I32) -> StepPlan:
        """The plan's columns for chosen rows."""
        samples = (start + lengths == self._known[slots]).astype(np.int32)
        targets, scored = _NO_TOKENS, self._zeros[: len(slots)]
        if int(np.maximum.reduce(lengths)) == 1:
            # A row of one token that is not its sequence's last known one (a chunk of 1) must be read from the sequence.
            tokens = self._last_token[slots]
            for row in np.flatnonzero(samples == 0).tolist():
                tokens[row] = self._sequence_at(int(slots[row])).tokens[int(start[row])]
        else:
            tokens = np.concatenate([self._tokens(s, a, n) for s, a, n in zip(slots.tolist(), start.tolist(), lengths.tolist(), strict=True)])
        scored_logprobs = self._scored[slots]
        if int(np.maximum.reduce(scored_logprobs)) >= 0:
            targets, scored = self._targets(slots, start, lengths)
        return StepPlan(
            step=self._step,
            delta=self._writer.delta(),
            slot=slots,
            request=self._identity[slots],
            start=start,
            length=lengths,
            num_samples=samples,
            num_scored=scored,
            state_slot=self._no_state[: len(slots)],
            tokens=tokens,
            targets=targets,
            scored_logprobs=scored_logprobs,
            sampling=self._columns.gather(slots, samples),
        )

    def _sequence_at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None, f"slot {slot} is running"
        return sequence

    def _tokens(self, slot: int, start: int, length: int) -> I32:
        if length == 1 and start + 1 == self._known[slot]:
            return self._last_token[slot : slot + 1]
        return self._sequence_at(slot).slice(start, start + length)

    def _targets(self, slots: I32, start: I32, lengths: I32) -> tuple[I32, I32]:
        """Prompt tokens to score: position p of a row is scored against prompt token p + 1."""
        targets, counts = [_NO_TOKENS], np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            if self._scored[slot] >= 0:
                sequence, first = self._sequence_at(slot), int(start[row]) + 1
                given = sequence.slice(first, min(first + int(lengths[row]), sequence.num_prompt))
                targets.append(given)
                counts[row] = len(given)
        return np.concatenate(targets), counts

    # ---- audit ---------------------------------------------------------------------------------------------------------------

    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, admitted first to last."""
        return tuple(self._order)

    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences, next first."""
        return tuple(self._waiting)

    def sequences_of(self, plan: StepPlan, rows: Iterable[int]) -> list[Sequence]:
        """The running sequences behind rows of a plan."""
        return [self._sequence_at(int(plan.slot[row])) for row in rows]

    def check_plan(self, plan: StepPlan) -> None:
        """Raises LawViolation unless every page that the plan writes belongs to its row alone and is not sealed (exhaustive)."""
        size = self.limits.page_size
        for row, (slot, start, length) in enumerate(zip(plan.slot.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True)):
            for page in self.table.pages[slot, start // size : ceil_div(start + length, size)].tolist():
                if self.prefix.digest_of(page) is not None or self.pool.references[page] != 1:
                    raise LawViolation("sealed pages are immutable", f"page {page} is sealed or shared and would be written", (row,))

    def check(self) -> None:
        """Raises LawViolation unless pages, slots and positions are consistent (exhaustive: for audit mode and tests)."""
        size = self.limits.page_size
        slots = [s.slot for s in self._order]
        if len(set(slots) | set(self._free_slots)) != self.limits.max_batch or len(slots) + len(self._free_slots) != self.limits.max_batch:
            raise LawViolation("slots", f"running {sorted(slots)} and free {sorted(self._free_slots)} do not make up {self.limits.max_batch} slots")
        self.pool.check([self.table.page_list(slot).tolist() for slot in slots])
        for sequence in self._order:
            slot = sequence.slot
            computed, known, held = int(self._computed[slot]), int(self._known[slot]), int(self.table.num_pages[slot])
            if known != len(sequence.tokens) or not 0 <= computed < known:
                raise LawViolation("positions", f"sequence {sequence.id}: computed {computed}, known {known}, tokens {len(sequence.tokens)}")
            if held * size < computed:
                raise LawViolation("pages(view)", f"sequence {sequence.id}: {held} pages of {size} do not hold {computed} tokens")
            for i, page in enumerate(self.table.page_list(slot).tolist()):
                digest = self.prefix.digest_of(page)
                if digest is not None and (i + 1) * size > computed:
                    raise LawViolation("sealed <= written", f"page {page} of sequence {sequence.id} is sealed, {computed} tokens are written")
                if digest is not None and digest != sequence.digests[i]:
                    raise LawViolation("sealed content", f"page {page} at index {i} of sequence {sequence.id} is sealed with another history")
