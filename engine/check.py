"""Exhaustive checks of the scheduler's state, for audit mode and tests. They only read; what every step checks is the auditor's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfer.errors import LawViolation
from twinfer.limits import ceil_div
from twinfer.plan import StepPlan

if TYPE_CHECKING:
    from twinfer.engine.scheduler import Scheduler


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """Raises LawViolation unless every page that the plan writes belongs to its row alone and is not sealed."""
    size, pages = scheduler.limits.page_size, scheduler.table.pages
    for row, (slot, start, length) in enumerate(zip(plan.slot.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True)):
        for page in pages[slot, start // size : ceil_div(start + length, size)].tolist():
            if scheduler.prefix.digest_of(page) is not None or scheduler.pool.references[page] != 1:
                raise LawViolation("sealed pages are immutable", f"page {page} is sealed or shared and would be written", (row,))


def check_state(scheduler: Scheduler) -> None:
    """Raises LawViolation unless pages, slots and positions are consistent."""
    size, table = scheduler.limits.page_size, scheduler.table
    present = (*scheduler.running(), *scheduler.departing())
    slots = [sequence.slot for sequence in present]
    free = scheduler.free_slots()
    if sorted([*slots, *free]) != list(range(scheduler.limits.max_batch)):
        raise LawViolation("slots", f"taken {sorted(slots)} and free {sorted(free)} do not make up {scheduler.limits.max_batch} slots")
    scheduler.pool.check([table.page_list(slot).tolist() for slot in slots])
    for sequence in present:
        computed, planned, known, pending = scheduler.position(sequence)
        held = int(table.num_pages[sequence.slot])
        gone = sequence in scheduler.departing()
        if not 0 <= computed <= planned <= known or (not gone and (known != len(sequence.tokens) + pending or computed == known)):
            raise LawViolation(
                "positions", f"sequence {sequence.id}: computed {computed}, planned {planned}, known {known}, tokens {len(sequence.tokens)}, unread {pending}"
            )
        if held * size < planned:
            raise LawViolation("pages(view)", f"sequence {sequence.id}: {held} pages of {size} do not hold {planned} tokens")
        for i, page in enumerate(table.page_list(sequence.slot).tolist()):
            digest = scheduler.prefix.digest_of(page)
            if digest is not None and (i + 1) * size > computed:
                raise LawViolation("sealed <= written", f"page {page} of sequence {sequence.id} is sealed, {computed} tokens are written")
            if digest is not None and digest != sequence.digests[i]:
                raise LawViolation("sealed content", f"page {page} at index {i} of sequence {sequence.id} is sealed with another history")
