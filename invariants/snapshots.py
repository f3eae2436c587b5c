"""Whether a plan's copies between snapshots and state slots are right: three laws' checks. Without SnapshotColumns nothing is known of lengths, and two of
them look at the plan alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinfer.invariants.facts import I32, StepView

Mask = NDArray[np.bool_]


def displaced(view: StepView) -> Mask:
    """Rows whose state slot, or whose snapshot, is in a copy that breaks the law `state_copies`."""
    (read, into), (out_of, written) = view.plan.restores.T, view.plan.saves.T
    wrong = np.zeros(len(view.context), np.bool_)
    for states, bad in ((into, _again(into)), (out_of, _again(out_of) | _again(written) | np.isin(written, read))):
        wrong |= np.isin(view.plan.state_slot, states[bad])
    return wrong


def misread(view: StepView) -> Mask:
    """Rows that are restored from a snapshot which is not written or has another length than the row's first position."""
    snapshot, states = view.plan.restores.T
    wrong, start = _none(view), _by_row(view, states, view.plan.start)
    known = view.snapshots
    bad = start < 1  # a row that begins at 0 has no past
    if known is not None and len(known.length):
        at = np.clip(snapshot, 0, len(known.length) - 1)
        bad = bad | ~known.written[at] | (known.length[at] != start)
    wrong |= np.isin(view.plan.state_slot, states[bad])
    return wrong


def miswritten(view: StepView) -> Mask:
    """Rows that are saved off the grid, or into a snapshot that is not held for this length or was written before."""
    states, snapshot = view.plan.saves.T
    wrong, end = _none(view), _by_row(view, states, view.context)
    known = view.snapshots
    bad = (end < 1) | (end % view.limits.snapshot_grid != 0)
    if known is not None and len(known.length):
        at = np.clip(snapshot, 0, len(known.length) - 1)
        bad = bad | known.written[at] | (known.length[at] != end)
    wrong |= np.isin(view.plan.state_slot, states[bad])
    return wrong


def places_hold(view: StepView) -> bool:
    """Every copy is of a row's own state, once each way; no snapshot is written twice, nor read and written."""
    restores, saves = view.plan.restores, view.plan.saves
    if not restores.size and not saves.size:
        return True  # the usual step
    into, out_of, written = restores[:, 1], saves[:, 0], saves[:, 1]
    if _again(into).any() or _again(out_of).any() or _again(written).any() or np.isin(written, restores[:, 0]).any():
        return False
    return bool((np.isin(np.concatenate([into, out_of]), view.plan.state_slot)).all())


def restores_hold(view: StepView) -> bool:
    """No row is misread."""
    return not view.plan.restores.size or not misread(view).any()


def saves_hold(view: StepView) -> bool:
    """No row is miswritten."""
    return not view.plan.saves.size or not miswritten(view).any()


def _by_row(view: StepView, states: I32, column: I32) -> I32:
    """The column's entry of the row that has each of these state slots; -1 for a slot that no row has."""
    order = np.argsort(view.plan.state_slot, kind="stable")
    owned = view.plan.state_slot[order]
    at = np.minimum(np.searchsorted(owned, states), max(len(owned) - 1, 0))
    found = np.full(len(states), -1, np.int32)
    if len(owned):
        found = np.where(owned[at] == states, column[order][at], found)
    return found


def _again(values: I32) -> Mask:
    _, first = np.unique(values, return_index=True)
    again = np.ones(len(values), np.bool_)
    again[first] = False
    return again


def _none(view: StepView) -> Mask:
    return np.zeros(len(view.context), np.bool_)
