"""RowChoice: which running sequences have a row in the next step, with how many tokens, and the pages that their rows lack. No admission.

Every running sequence that has one token to compute (a decode row) goes first, then the others in order of admission fill the step up to
max_step_tokens, in chunks of at most max_chunk_tokens that end where a snapshot of a state is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.slots import I32, SlotTable
from twinfer.limits import Limits


class RowChoice(SlotTable):
    """Chooses among the sequences of a SlotTable, steps in flight considered."""

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]], prefix_cache: bool = True) -> None:
        super().__init__(limits, make, prefix_cache)
        self._step = 0  # number of the next step to launch
        self._num_ready = 0  # running sequences that the last `_choose` could have given a row

    @property
    def num_in_flight(self) -> int:
        """Launched steps that are not over."""
        return self._step - 1 - self._over

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
            if self.keeping.active:  # a chunk ends where a snapshot is wanted
                lengths = np.minimum(lengths, self.keeping.stop[slots] - start)
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
