"""TableWriter: changes the engine's page table and remembers what changed, until an executor has been told. No choice of pages.

A plan that is refused before launch was never delivered: its changes stay pending and travel with the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinfer.table import PageTable, TableDelta

I32 = NDArray[np.int32]
_EMPTY = np.empty(0, np.int32)


class TableWriter:
    """Writes into `table` at once; `delta` gives everything since the last `delivered`."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self._delivered = table.version
        self._entries: list[tuple[I32, I32, I32]] = []
        self._lengths: list[tuple[I32, I32]] = []

    def append(self, slot: int, pages: Sequence[int]) -> None:
        """Adds pages at the end of one slot's page list."""
        if not pages:
            return
        held = int(self.table.num_pages[slot])
        index = np.arange(held, held + len(pages), dtype=np.int32)
        self._write(np.full(len(pages), slot, np.int32), index, np.array(pages, np.int32))
        self._resize(np.array([slot], np.int32), np.array([held + len(pages)], np.int32))

    def append_one_each(self, slots: I32, pages: Sequence[int]) -> None:
        """Adds one page to each of the distinct `slots`."""
        index = self.table.num_pages[slots]
        self._write(slots, index, np.array(pages, np.int32))
        self._resize(slots, index + 1)

    def clear(self, slot: int) -> None:
        """Empties one slot's page list."""
        self._resize(np.array([slot], np.int32), np.zeros(1, np.int32))

    def delta(self) -> TableDelta:
        """All changes since the last delivered plan; moves the table to the version that they lead to."""
        self.table.version = self._delivered + 1
        if not self._entries and not self._lengths:
            return TableDelta(self._delivered)
        slots, indices, pages = _last_of(self._entries)
        length_slots, _, length_pages = _last_of([(changed, np.zeros_like(changed), lengths) for changed, lengths in self._lengths])
        return TableDelta(self._delivered, slots, indices, pages, length_slots, length_pages)

    def delivered(self) -> None:
        """An executor has the changes of the last `delta`."""
        self._delivered += 1
        self._entries.clear()
        self._lengths.clear()

    def _write(self, slots: I32, indices: I32, pages: I32) -> None:
        self.table.pages[slots, indices] = pages
        self._entries.append((slots, indices, pages))

    def _resize(self, slots: I32, lengths: I32) -> None:
        self.table.resize(slots, lengths)
        self._lengths.append((slots, lengths))


def _last_of(writes: list[tuple[I32, I32, I32]]) -> tuple[I32, I32, I32]:
    """Joins writes of (slots, indices, values); of writes to one place only the last stays, since a device scatters in no particular order."""
    if not writes:
        return _EMPTY, _EMPTY, _EMPTY
    if len(writes) == 1:  # one write never names a place twice
        return writes[0]
    slots, indices, values = (np.concatenate([write[i] for write in writes]) for i in range(3))
    place = (slots.astype(np.int64) << 32) | indices
    _, last = np.unique(place[::-1], return_index=True)
    keep = np.sort(len(place) - 1 - last)
    return slots[keep], indices[keep], values[keep]
