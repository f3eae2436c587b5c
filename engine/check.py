"""The engine's state as the values that state laws speak of (`twinfer.invariants.state`), and its exhaustive check. It only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfer.errors import LawViolation
from twinfer.invariants.state import SEQUENCE_LAWS, SNAPSHOT_LAWS, LoopState, SequencesState, SequenceState, SnapshotsState, check
from twinfer.limits import ceil_div
from twinfer.plan import StepPlan

if TYPE_CHECKING:
    from twinfer.engine.loop import Loop
    from twinfer.engine.scheduler import Scheduler
    from twinfer.engine.sequence import Sequence


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raises LawViolation unless every page that the plan writes belongs to its row alone and is not sealed."""
    size, pages = scheduler.limits.page_size, scheduler.table.pages
    for row, (slot, start, length) in enumerate(zip(plan.slot.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True)):
        for page in pages[slot, start // size : ceil_div(start + length, size)].tolist():
            if scheduler.prefix.digest_of(page) is not None or scheduler.pool.references[page] != 1:
                raise LawViolation("sealed pages are immutable", f"page {page} is sealed or shared and would be written", (row,))


def check_state(scheduler: Scheduler) -> None:
    """Raises LawViolation unless pages, slots, positions and snapshots are consistent."""
    present = (*scheduler.running(), *scheduler.departing())
    scheduler.pool.check([scheduler.table.page_list(sequence.slot).tolist() for sequence in present])
    check(SEQUENCE_LAWS, sequences_state(scheduler))
    if scheduler.keeping.active:
        check(SNAPSHOT_LAWS, snapshots_state(scheduler))


def sequences_state(scheduler: Scheduler) -> SequencesState:
    """Every sequence that has a slot, and what those that run or wait may come to hold."""
    limits, running, departing = scheduler.limits, scheduler.running(), scheduler.departing()
    states = [_state(scheduler, sequence, sequence in departing) for sequence in (*running, *departing)]
    # The last generated token is never computed.
    peaks = [sequence.num_prompt + sequence.max_new - 1 for sequence in (*running, *scheduler.waiting())]
    free_slots, free_states = scheduler.free_slots(), scheduler.states.free()
    grid = scheduler.hit_grid
    return SequencesState(limits.max_batch, limits.page_size, limits.num_pages, states, free_slots, peaks, limits.num_state_slots, free_states, grid)


def snapshots_state(scheduler: Scheduler) -> SnapshotsState:
    """Every snapshot, and what sequences that have a slot find by their own tokens."""
    keeping, size = scheduler.keeping, scheduler.limits.page_size
    pool = keeping.pool
    present = (*scheduler.running(), *scheduler.departing())
    prefixes = [(pool.find(digest), (i + 1) * size) for sequence in present for i, digest in enumerate(sequence.digests)]
    found = [(snapshot, tokens) for snapshot, tokens in prefixes if snapshot >= 0]
    restored = [(keeping.restored_from[s.slot], scheduler.position(s)[1]) for s in present if keeping.restored_from[s.slot] >= 0]
    return SnapshotsState(
        keeping.grid, pool.length, pool.written, pool.pins, pool.free(), pool.cached(), pool.keys(), keeping.pending(), [*found, *restored],
        scheduler.prefix.digests(),
    )  # fmt: skip


def _state(scheduler: Scheduler, sequence: Sequence, departing: bool) -> SequenceState:
    computed, planned, known, unread = scheduler.position(sequence)
    pages = scheduler.table.page_list(sequence.slot).tolist()
    digests = [scheduler.prefix.digest_of(page) for page in pages]
    sealed = [None if digest is None else sequence.digests[i : i + 1] == [digest] for i, digest in enumerate(digests)]
    state_slot = scheduler.state_slot_of(sequence)
    # A snapshot that is yet to be restored counts as being in its slot.
    restored_from = int(scheduler.keeping.restored_from[sequence.slot])
    state_length = scheduler.keeping.pool.length[restored_from] if restored_from >= 0 else scheduler.states.length[state_slot] if state_slot >= 0 else -1
    return SequenceState(
        sequence.id, sequence.slot, computed, planned, known, len(sequence.tokens), unread, sequence.num_cached, sequence.num_prompt, pages, sealed,
        departing, state_slot, int(state_length),
    )  # fmt: skip


def loop_state(loop: Loop) -> LoopState:
    """The loop in a few numbers: quick, for every step."""
    scheduler = loop.scheduler
    return LoopState(
        look_ahead=loop.limits.look_ahead,
        in_flight=loop.in_flight,
        identity=scheduler.slot_state.identity,
        num_accepted=loop.num_accepted,
        num_told=loop.num_told,
        num_live=loop.num_live,
        has_work=scheduler.has_work,
        num_held=scheduler.pool.num_held,
        num_taken=scheduler.num_taken,
        num_states=scheduler.states.num_held,
        num_pinned=scheduler.keeping.pool.num_pinned,
    )
