"""PagePool: which pages are free, held or cached, and how often each is referenced. Not what is on them, nor whose they are.

Invariants, checked by `check` and by every property test:
  each page 1..num_pages is in exactly one of: free, cached (sealed, no reference, evictable), held (at least one reference);
  free + cached + held == num_pages; references are never negative; page 0 is the padding page and belongs to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import LawViolation
from twinfer.invariants.state import POOL_LAWS, PoolState, check


class PagePool:
    """Counts references to pages; evicts the least recently used sealed page that nobody references when the free ones run out.

    references  [num_pages + 1] int32, from the ledger
    sealed      [num_pages + 1] bool, from the ledger: full, written and findable
    on_evict    called with a cached page just before it is given to somebody else
    """

    def __init__(self, num_pages: int, references: NDArray[np.int32], sealed: NDArray[np.bool_], on_evict: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.references, self.sealed = references, sealed
        self._on_evict = on_evict
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Makes every page free, whatever it was."""
        self.references[:] = 0
        self._free = list(range(self.num_pages, 0, -1))  # popped from the end: page 1 first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.sealed[:] = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages with one reference each. The caller has checked `num_available`; asking for more is a LawViolation."""
        if count > self.num_available:
            raise LawViolation("pool", f"{count} pages asked for, {self.num_available} available of {self.num_pages}")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._on_evict(page)
                self.sealed[page] = False
                self.num_evictions += 1
            self.references[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one reference to each sealed page (a prefix hit)."""
        for page in pages:
            if self.references[page] == 0:
                del self._cached[page]
            self.references[page] += 1

    def seal(self, page: int) -> None:
        """Marks a held page as full, written and findable: when its last reference goes, it is cached instead of freed."""
        if self.references[page] < 1:
            raise LawViolation("pool", f"page {page} is sealed but nobody holds it")
        self.sealed[page] = True

    def supersede(self, page: int) -> None:
        """Frees a cached page: another one with the same content is found in its place."""
        if page not in self._cached:
            raise LawViolation("pool", f"page {page} is superseded, but it is not cached")
        del self._cached[page]
        self.sealed[page] = False
        self._free.append(page)

    def unseal(self, page: int) -> None:
        """Takes back a seal: nobody finds the page any more, and it is freed, not cached, when its last reference goes."""
        if self.references[page] < 1 or not self.sealed[page]:
            raise LawViolation("pool", f"page {page} is unsealed, but nobody holds it or it has no seal")
        self._on_evict(page)
        self.sealed[page] = False

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page. Given in list order, the tail is cached first, so that it is evicted before what it extends."""
        for page in reversed(pages):
            if self.references[page] < 1:
                raise LawViolation("pool", f"page {page} is released more often than it was taken")
            self.references[page] -= 1
            if self.references[page] == 0:
                if self.sealed[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def drop_cached(self) -> int:
        """Evicts every cached page; returns how many."""
        count = len(self._cached)
        while self._cached:
            page, _ = self._cached.popitem(last=False)
            self._on_evict(page)
            self.sealed[page] = False
            self._free.append(page)
        return count

    def check(self, page_lists: Sequence[Sequence[int]]) -> None:
        """Raises LawViolation unless the pool agrees with the page lists of all running sequences (exhaustive: O(pages))."""
        check(POOL_LAWS, PoolState(self.references, self.sealed, self._free, list(self._cached), page_lists))
