"""PageTable: the page list of every batch slot, as two integer arrays with a version. It records; which page goes where is the pool's choice.

The table persists: at batch 256 and 16k contexts a step refers to 256k pages, so a plan carries only what changed (`TableDelta`), numbered by
the version that it starts from. The engine owns one table, each executor keeps a replica.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import TableVersionError

I32 = NDArray[np.int32]


def _none() -> I32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TableDelta:
    """Changes that turn version `base` of a table into version `base + 1`.

    entry_slot, entry_index, entry_page   [num_entries] int32: page list of `slot` at `index` becomes `page`
    length_slot, length_pages             [num_lengths] int32: the page list of `slot` is `pages` long from now on
    """

    base: int
    entry_slot: I32 = field(default_factory=_none)
    entry_index: I32 = field(default_factory=_none)
    entry_page: I32 = field(default_factory=_none)
    length_slot: I32 = field(default_factory=_none)
    length_pages: I32 = field(default_factory=_none)

    @property
    def num_entries(self) -> int:
        return len(self.entry_slot)


class PageTable:
    """pages [num_slots, pages_per_context] int32, num_pages [num_slots] int32.

    Invariants: `pages[s, : num_pages[s]]` is slot s's page list, in order of positions; what lies beyond is stale and never read.
    `page_lists[s]` is that very view: kept, since making 256 views a step costs more than the step's other bookkeeping.
    """

    __slots__ = ("num_pages", "page_lists", "pages", "version")

    def __init__(self, pages: I32, num_pages: I32) -> None:
        """Takes the two arrays (from a ledger) and empties every list."""
        self.pages, self.num_pages, self.version = pages, num_pages, 0
        self.page_lists: list[I32] = [row[:0] for row in pages]

    def apply(self, delta: TableDelta) -> None:
        """Moves to the next version. Raises TableVersionError when the delta starts elsewhere."""
        if delta.base != self.version:
            raise TableVersionError(self.version, delta.base)
        if len(delta.entry_slot):
            self.pages[delta.entry_slot, delta.entry_index] = delta.entry_page
        if len(delta.length_slot):
            self.resize(delta.length_slot, delta.length_pages)
        self.version += 1

    def resize(self, slots: I32, lengths: I32) -> None:
        """Makes the page lists of distinct `slots` so many pages long."""
        self.num_pages[slots] = lengths
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.page_lists[slot] = self.pages[slot, :length]

    def page_list(self, slot: int) -> I32:
        """A view of one slot's page list, [num_pages[slot]] int32."""
        return self.page_lists[slot]
