"""SlotTable: which sequence holds each batch slot, how far it has come, which pages it lists, found ones included, and its state slot.

A sequence that ends while a step in flight holds a row of it *departs*: it keeps its slot and its pages until that step is over, so no page is freed
with a pending writer. Which states are kept as snapshots is `keeping`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.columns import SlotColumns
from twinfer.engine.keeping import Hit, Keeping
from twinfer.engine.order import Order
from twinfer.engine.pages import PagePool
from twinfer.engine.prefix import PrefixCache
from twinfer.engine.rows import RowBuilder
from twinfer.engine.sequence import Sequence
from twinfer.engine.states import NO_SLOT, StatePool
from twinfer.engine.tables import TableWriter
from twinfer.invariants.facts import PageState, SlotState
from twinfer.limits import Limits
from twinfer.table import PageTable

I32 = NDArray[np.int32]
NOBODY = -1  # the identity of a slot that is free


class SlotTable:
    """`make(name)` gives host arrays from the ledger; `prefix_cache=False` never shares pages, nor does a model that keeps states and no snapshots."""

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]], prefix_cache: bool = True) -> None:
        self.limits = limits
        # A hit needs a state at exactly its length, and a state is at one length only, its sequence's own, unless there are snapshots.
        self.prefix_cache = prefix_cache and (not limits.num_state_slots or limits.num_snapshots > 0)
        self.prefix = PrefixCache(limits.page_size)
        self.pool = PagePool(limits.num_pages, make("page_references"), make("page_sealed"), self._forget)
        self.table = PageTable(make("page_table"), make("page_counts"))
        self.states = StatePool(limits.num_state_slots, make("state_owner"), make("state_length"))
        self.keeping = Keeping(limits, make)
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
        self._state_slot: I32 = make("state_slot")
        self._state_slot[:] = NO_SLOT
        self._by_slot: list[Sequence | None] = [None] * limits.max_batch
        self._rows = RowBuilder(make, self._by_slot, self._columns)
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._running: list[Sequence] = []  # admitted first to last
        self._departing: list[Sequence] = []
        self._over = -1  # number of the last step that is over
        self._refresh()
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    # ---- who comes and goes --------------------------------------------------------------------------------------------------

    def _enter(self, sequence: Sequence, hit: Hit) -> int:
        """Gives a waiting sequence a slot, with the hit's pages at the beginning of its page list and its snapshot to go on from."""
        slot = self._free_slots.pop()
        cached = len(hit.pages) * self.limits.page_size
        if sequence.use_cache:
            self.num_prefix_queries += len(sequence.tokens)
            self.num_prefix_hits += cached
        if sequence.num_preemptions == 0:
            sequence.num_cached = cached
        sequence.slot = slot
        self.pool.share(hit.pages)
        self.keeping.enter(slot, sequence, hit)
        self._writer.clear(slot)
        self._writer.append(slot, hit.pages)
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
        self._state_slot[slot] = self.states.take(sequence.id)
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
        self.keeping.leave(slot)
        self.states.release(int(self._state_slot[slot]))
        self._state_slot[slot] = NO_SLOT
        self._free_slots.append(slot)
        sequence.slot = -1

    def _release_departed(self) -> None:
        for sequence in [s for s in self._departing if self._last_step[s.slot] <= self._over]:
            self._departing.remove(sequence)
            self._release(sequence)

    def _clear_slots(self) -> None:
        """Forgets who is in every slot, and every page, cached ones too. Needs no consistent state."""
        for sequence in (*self._running, *self._departing):
            sequence.slot = -1
        self._running.clear()
        self._departing.clear()
        self._by_slot[:] = [None] * self.limits.max_batch
        self._identity[:] = NOBODY
        self._free_slots = list(range(self.limits.max_batch - 1, -1, -1))
        self.prefix.clear()
        self.pool.reset()
        self.states.reset()
        self.keeping.reset()
        self._state_slot[:] = NO_SLOT
        for slot in range(self.limits.max_batch):
            self._writer.clear(slot)
            self._columns.clear(slot)
        self._refresh()

    def _refresh(self) -> None:
        self._order = Order.of([s.slot for s in self._running], self._identity, self._scored, self._state_slot)

    def _sequence_at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None, f"slot {slot} is taken"
        return sequence

    # ---- pages with what somebody else has computed --------------------------------------------------------------------------

    @property
    def hit_grid(self) -> int:
        """Tokens that the length of every hit is a multiple of."""
        return self.keeping.grid if self.limits.num_state_slots else self.limits.page_size

    def _match(self, sequence: Sequence) -> Hit:
        """Sealed pages that hold the beginning of the sequence, with the state behind them; at least one known token is left to compute."""
        if not sequence.use_cache:
            return Hit([])
        limit = (len(sequence.tokens) - 1) // self.hit_grid * self.hit_grid // self.limits.page_size
        self._digest(sequence, limit)
        return self.keeping.hit(sequence, self.prefix.match(sequence.digests[:limit]))

    def _forget(self, page: int) -> None:
        """A sealed page is about to hold something else, or is not to be trusted: neither it nor a snapshot behind it is found any more."""
        digest = self.prefix.digest_of(page)
        self.prefix.forget(page)
        if digest is not None:
            self.keeping.pool.forget(digest)

    def _digest(self, sequence: Sequence, num_pages: int) -> None:
        """Extends the sequence's digests to its first `num_pages` full pages."""
        size, digests = self.limits.page_size, sequence.digests
        for i in range(len(digests), num_pages):
            before = digests[-1] if digests else sequence.root
            digests.append(self.prefix.extend(before, sequence.tokens[i * size : (i + 1) * size].tobytes()))

    def _seal(self, sequence: Sequence, first: int, end: int) -> None:
        """Makes pages first..end-1 of the sequence findable: all their tokens are computed, so their keys and values are written.

        Where a state was missing, a prompt computes again what sealed pages hold. Its own take their place if nobody holds those: they are used last, and
        two copies of one content would evict something else.
        """
        self._digest(sequence, end)
        pages = self.table.page_list(sequence.slot)
        for i in range(first, end):
            page, digest = int(pages[i]), sequence.digests[i]
            known = self.prefix.page_of(digest)
            if known is None:
                self.prefix.seal(page, digest)
                self.pool.seal(page)
            elif self.pool.references[known] == 0:
                self.prefix.move(digest, page)
                self.pool.seal(page)
                self.pool.supersede(known)

    # ---- looking on ----------------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> tuple[Sequence, ...]:
        """Running sequences, admitted first to last."""
        return tuple(self._running)

    def departing(self) -> tuple[Sequence, ...]:
        """Sequences that have ended and keep their pages until their last step in flight is over."""
        return tuple(self._departing)

    def free_slots(self) -> tuple[int, ...]:
        """Batch slots that nobody has."""
        return tuple(self._free_slots)

    @property
    def num_taken(self) -> int:
        """Batch slots that somebody has."""
        return self.limits.max_batch - len(self._free_slots)

    def cached(self) -> tuple[NDArray[np.int64], I32]:
        """Of each slot, as they are now: the sequence, -1 for none, and its tokens in cache by committed steps."""
        return self._identity.copy(), self._computed.copy()

    @property
    def slot_state(self) -> SlotState:
        """What the auditor compares rows with: the very columns, as they are now and later."""
        return SlotState(self._identity, self._planned, self._known, self._unread)

    @property
    def page_state(self) -> PageState:
        """The same of the pool's pages."""
        return PageState(self.pool.references, self.pool.sealed)

    def state_slot_of(self, sequence: Sequence) -> int:
        """The state slot of a sequence that has a batch slot; -1 in a model that keeps no state."""
        return int(self._state_slot[sequence.slot])

    def position(self, sequence: Sequence) -> tuple[int, int, int, int]:
        """(computed, planned, known, unread) of a sequence that has a slot."""
        slot = sequence.slot
        return int(self._computed[slot]), int(self._planned[slot]), int(self._known[slot]), int(self._unread[slot])
