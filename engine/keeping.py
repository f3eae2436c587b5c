"""Keeping: which states of a model with Gated DeltaNet layers become snapshots, the copies of each step, and what becomes of them. It holds no state itself.

A state is at one length only, so a prefix is found only where somebody took a snapshot. Taken is, always at multiples of the grid:
  - the last point before a prompt's end, so that the same prompt, or one that goes on from it, computes its tail alone;
  - the last point of a cached chain of pages that a prompt follows and leaves, so that the third prompt with that beginning hits it;
  - a point every `snapshot_interval` tokens of a prompt: what eviction, preemption or another branch makes somebody compute again at most;
  - each point that generation passes, which gives way to the next one unless somebody has found it: the last one before the answer's end stays, and
    the next turn, which sends prompt and answer again, hits it.
A save is done at a step's end, so a chunk ends at a wanted point (`stop`) and the rest of the prompt is the next chunk.

A snapshot that a step saves is found when the step is over and its row is alive, not before: one of a failed step, of a row whose logits are no numbers,
or of a token that turned out to be too many is never found by anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.sequence import Sequence as Sample
from twinfer.engine.snapshots import NO_SNAPSHOT, SnapshotPool
from twinfer.limits import Limits, ceil_div
from twinfer.plan import StepPlan, no_copies

I32 = NDArray[np.int32]
NEVER = 2**31 - 1  # no point is wanted


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a sequence's beginning.

    pages     sealed pages, whole
    snapshot  of the state behind them; NO_SNAPSHOT where nothing is found, or in a model that keeps no states
    points    where the sequence wants snapshots beyond them, ascending
    """

    pages: list[int]
    snapshot: int = NO_SNAPSHOT
    points: tuple[int, ...] = ()


class Keeping:
    """`make(name)` gives host arrays from the ledger. With `num_snapshots` 0 every method is nothing, and every hit is the pages themselves."""

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]]) -> None:
        self.pool = SnapshotPool(limits.num_snapshots, make("snapshot_length"), make("snapshot_written"), make("snapshot_pins"))
        self.grid, self._page_size = limits.snapshot_grid, limits.page_size
        self._interval = ceil_div(limits.snapshot_interval, self.grid) * self.grid
        self.stop: I32 = make("next_snapshot")  # by batch slot: the next point at which a chunk ends
        self.restored_from: I32 = make("restored_from")  # by batch slot: the snapshot that its next row goes on from, pinned
        self._reserved: list[int] = []  # for the saves of a plan that was not launched yet
        self._copying: list[StepPlan] = []  # launched, not over, with copies
        self._clear()

    def reset(self) -> None:
        """Forgets every snapshot and every copy."""
        self.pool.reset()
        self._clear()

    def _clear(self) -> None:
        self.stop[:] = NEVER
        self.restored_from[:] = NO_SNAPSHOT
        self._reserved.clear()
        self._copying.clear()

    @property
    def active(self) -> bool:
        """Whether any state is kept."""
        return self.pool.num_snapshots > 0

    # ---- who comes and goes --------------------------------------------------------------------------------------------------

    def hit(self, sequence: Sample, pages: list[int]) -> Hit:
        """What can be used of the sealed pages that hold a sequence's beginning: up to the longest point with a snapshot."""
        if not self.active:
            return Hit(pages)
        step, grid = self.grid // self._page_size, self.grid
        chain = len(pages) // step  # points that the pages reach
        for point in range(chain, 0, -1):
            snapshot = self.pool.find(sequence.digests[point * step - 1])
            if snapshot != NO_SNAPSHOT:
                return Hit(pages[: point * step], snapshot, self._points(sequence, point * grid, chain * grid))
        return Hit([], NO_SNAPSHOT, self._points(sequence, 0, chain * grid))

    def _points(self, sequence: Sample, begin: int, branch: int) -> tuple[int, ...]:
        known = len(sequence.tokens)
        last = (known - 1) // self.grid * self.grid
        points = {branch, last, *range(self._interval, last, self._interval)}
        return tuple(sorted(point for point in points if begin < point <= last))

    def enter(self, slot: int, sequence: Sample, hit: Hit) -> None:
        """A sequence has taken a batch slot; its first row goes on from the hit's snapshot."""
        sequence.points = list(hit.points)
        self.stop[slot] = sequence.points[0] if sequence.points else NEVER
        if hit.snapshot != NO_SNAPSHOT:
            self.pool.pin(hit.snapshot)
            self.restored_from[slot] = hit.snapshot

    def leave(self, slot: int) -> None:
        """A batch slot is free; what it was to be restored from is not needed."""
        if self.restored_from[slot] != NO_SNAPSHOT:
            self.pool.unpin(int(self.restored_from[slot]))
        self.restored_from[slot], self.stop[slot] = NO_SNAPSHOT, NEVER

    # ---- copies of a step ----------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """The last plan was not launched: what its saves had taken is free again."""
        for snapshot in self._reserved:
            self.pool.unpin(snapshot)
        self._reserved.clear()

    def copies(self, slots: I32, start: I32, lengths: I32, known: I32, state_slot: I32, by_slot: Sequence[Sample | None]) -> tuple[I32, I32]:
        """The restores and saves of a step with these rows; `state_slot` and `by_slot` are by batch slot. Takes the snapshots to save in."""
        if not self.active:
            return no_copies(), no_copies()
        restores = saves = no_copies()
        source = self.restored_from[slots]
        if int(source.max()) >= 0:
            found = source >= 0
            restores = np.stack([source[found], state_slot[slots[found]]], axis=1)
        ends = start + lengths
        wanted = (ends % self.grid == 0) & ((ends == self.stop[slots]) | (ends == known))
        if wanted.any():
            pairs = [(int(state_slot[slots[row]]), self._take(by_slot[slots[row]], int(ends[row]))) for row in np.flatnonzero(wanted).tolist()]
            self._reserved = [snapshot for _, snapshot in pairs if snapshot != NO_SNAPSHOT]
            saves = np.array([pair for pair in pairs if pair[1] != NO_SNAPSHOT], np.int32).reshape(-1, 2)
        return restores, saves

    def _take(self, sequence: Sample | None, end: int) -> int:
        """A snapshot for a row of the sequence that ends at `end`, unless there is one of it, or all are pinned, or it must not be found."""
        assert sequence is not None, "rows are of sequences"
        if not sequence.use_cache:
            return NO_SNAPSHOT
        index = end // self._page_size - 1
        if index < len(sequence.digests):
            found = self.pool.find(sequence.digests[index])
            if found != NO_SNAPSHOT:
                self.pool.touch(found)
                return NO_SNAPSHOT
        return self.pool.take(end, sequence.passed)

    def launched(self, plan: StepPlan, by_slot: Sequence[Sample | None]) -> None:
        """A step was handed to the executor: its copies are pending until it is over."""
        if not self.active:
            return
        if plan.restores.size:
            self.restored_from[plan.slot[np.isin(plan.state_slot, plan.restores[:, 1])]] = NO_SNAPSHOT
        self.pool.written[plan.saves[:, 1]] = True
        self._reserved.clear()
        if plan.restores.size or plan.saves.size:
            self._copying.append(plan)
        ends = plan.start + plan.length
        for row in np.flatnonzero(ends >= self.stop[plan.slot]).tolist():
            slot = int(plan.slot[row])
            sequence = by_slot[slot]
            assert sequence is not None, "rows are of sequences"
            sequence.points = [point for point in sequence.points if point > ends[row]]
            self.stop[slot] = sequence.points[0] if sequence.points else NEVER

    def over(self, plan: StepPlan, saved: dict[int, Sample]) -> None:
        """A step is over. `saved`: by state slot, the sequences whose rows are alive, with the digests of all pages that are full now.

        What was saved for them is found from now on; what was saved for others never is.
        """
        if not plan.restores.size and not plan.saves.size:
            return
        self._copying.remove(plan)
        for snapshot in plan.restores[:, 0].tolist():
            self.pool.unpin(snapshot)
        for state, snapshot in plan.saves.tolist():
            sequence = saved.get(state)
            if sequence is None:
                self.pool.unpin(snapshot)
                continue
            length = int(self.pool.length[snapshot])
            key = sequence.digests[length // self._page_size - 1]
            passing = length >= sequence.num_prompt
            self.pool.keep(snapshot, key, passing)
            if passing:
                if sequence.passed is not None and sequence.passed != key:
                    self.pool.pass_by(sequence.passed)
                sequence.passed = key

    def pending(self) -> list[int]:
        """Every snapshot that somebody is about to read or write, once for each: for checks."""
        waiting = self.restored_from[self.restored_from >= 0].tolist()
        flying = [snapshot for plan in self._copying for snapshot in (*plan.restores[:, 0].tolist(), *plan.saves[:, 1].tolist())]
        return [*waiting, *flying, *self._reserved]
