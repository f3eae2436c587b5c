"""SnapshotPool: which snapshots are free, held or found, at what length, and who is about to read or write them. Not the copies, which executors hold.

A snapshot is an immutable copy of a sequence's state at a multiple of `Limits.snapshot_grid` tokens. It is found by the digest of its last page, which
stands for all tokens before. Who reads it (a restore that is planned or in flight) or writes it (a save) holds a pin; the least recently used one that
nobody has pinned is evicted when the free ones run out.

Invariants, checked by `check` and by every property test:
  each snapshot is in exactly one of: free, cached (found, no pin, evictable), held (pinned); free + cached + held == num_snapshots;
  a snapshot that is found was written by a step that is over; digest -> snapshot and back are inverse to each other.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.prefix import Digest
from twinfer.errors import LawViolation
from twinfer.invariants.facts import SnapshotColumns

NO_SNAPSHOT = -1


class SnapshotPool:
    """`num_snapshots` 0: nothing is kept.

    length   [num_snapshots] int32, from the ledger: tokens behind it, -1 where it is free
    written  [num_snapshots] bool, from the ledger: the step that saves it was launched
    pins     [num_snapshots] int32, from the ledger: pending readers and writers
    """

    def __init__(self, num_snapshots: int, length: NDArray[np.int32], written: NDArray[np.bool_], pins: NDArray[np.int32]) -> None:
        self.num_snapshots = num_snapshots
        self.length, self.written, self.pins = length, written, pins
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Makes every snapshot free, whatever it was."""
        self._free = list(range(self.num_snapshots - 1, -1, -1))  # popped from the end: snapshot 0 first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_key: dict[Digest, int] = {}
        self._key: dict[int, Digest] = {}
        self._passing: set[int] = set()
        self.length[:] = -1
        self.written[:] = False
        self.pins[:] = 0

    @property
    def columns(self) -> SnapshotColumns:
        """What the auditor compares copies with: the very columns, as they are now and later."""
        return SnapshotColumns(self.length, self.written)

    @property
    def num_pinned(self) -> int:
        """Snapshots that somebody is about to read or write."""
        return int(np.count_nonzero(self.pins))

    def free(self) -> tuple[int, ...]:
        """Snapshots that hold nothing."""
        return tuple(self._free)

    def cached(self) -> tuple[int, ...]:
        """Snapshots that are found and that nobody has pinned, the one to be evicted first."""
        return tuple(self._cached)

    def keys(self) -> dict[Digest, int]:
        """Every snapshot that is found, by its key."""
        return dict(self._by_key)

    def find(self, key: Digest) -> int:
        """The snapshot of this key, or NO_SNAPSHOT."""
        return self._by_key.get(key, NO_SNAPSHOT)

    def take(self, length: int, passing: Digest | None = None) -> int:
        """A snapshot to save a state of `length` tokens in, pinned by its writer; NO_SNAPSHOT when all are pinned.

        passing   key of one that gives way before any other: the last that its own sequence has passed
        """
        if not self._free:
            own = self.find(passing) if passing is not None else NO_SNAPSHOT
            victim = own if own in self._passing and own in self._cached else next(iter(self._cached), NO_SNAPSHOT)
            if victim == NO_SNAPSHOT:
                return NO_SNAPSHOT
            self.num_evictions += 1
            self.forget(self._key[victim])
        snapshot = self._free.pop()
        self.length[snapshot], self.pins[snapshot] = length, 1
        return snapshot

    def pin(self, snapshot: int) -> None:
        """Somebody is going to restore a snapshot that was found: it stays, and is worth keeping beyond the sequence that left it."""
        if snapshot not in self._key:
            raise LawViolation("snapshot_pool", f"snapshot {snapshot} is pinned, but nobody finds it")
        self._passing.discard(snapshot)
        self._cached.pop(snapshot, None)
        self.pins[snapshot] += 1

    def unpin(self, snapshot: int) -> None:
        """Its reader has read it, or won't; its writer has written it, or won't. With the last pin it is cached if it is found, else free."""
        if self.pins[snapshot] < 1:
            raise LawViolation("snapshot_pool", f"snapshot {snapshot} is given up more often than it was pinned")
        self.pins[snapshot] -= 1
        if self.pins[snapshot]:
            return
        if snapshot in self._key:
            self._cached[snapshot] = None  # now the one used last
        else:
            self._release(snapshot)

    def keep(self, snapshot: int, key: Digest, passing: bool) -> None:
        """The step that saved it is over and right: it is found from now on. If the key is known already, that one stays.

        passing   it was taken as its sequence passed by, and gives way to the next one
        """
        known = self.find(key)
        if known == NO_SNAPSHOT:
            self._by_key[key], self._key[snapshot] = snapshot, key
            if passing:
                self._passing.add(snapshot)
        else:
            self.touch(known)
            if not passing:
                self._passing.discard(known)
        self.unpin(snapshot)

    def touch(self, snapshot: int) -> None:
        """Makes a snapshot that is found the one used last."""
        if snapshot in self._cached:
            self._cached.move_to_end(snapshot)

    def forget(self, key: Digest) -> None:
        """Nobody finds it any more, if there is one: it is free at once, or when its last pin goes."""
        snapshot = self._by_key.pop(key, NO_SNAPSHOT)
        if snapshot == NO_SNAPSHOT:
            return
        del self._key[snapshot]
        self._passing.discard(snapshot)
        if snapshot in self._cached:
            del self._cached[snapshot]
            self._release(snapshot)

    def pass_by(self, key: Digest) -> None:
        """Its sequence has left a later one: it is forgotten unless somebody has found it meanwhile."""
        if self.find(key) in self._passing:
            self.forget(key)

    def _release(self, snapshot: int) -> None:
        self.length[snapshot], self.written[snapshot] = -1, False
        self._free.append(snapshot)
