"""Whether a plan's rows go on from their own states: four laws' checks. A model without state has none, and without StateSlots two of them know nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinfer.invariants.facts import StepView, some

Mask = NDArray[np.bool_]


def stateless(view: StepView) -> Mask:
    """Rows without a state slot in a model that keeps states; in another, rows whose entry is not the -1 that stands for none."""
    slots = view.plan.state_slot
    wrong: Mask = slots < 0 if view.limits.num_state_slots else slots != -1
    return wrong


def sharing(view: StepView) -> Mask:
    """Rows whose state slot an earlier row of the step has."""
    slots = view.plan.state_slot
    _, first = np.unique(slots, return_index=True)
    again: Mask = slots >= 0
    again[first] = False
    return again


def disowned(view: StepView) -> Mask:
    """Rows whose state slot is not their sequence's."""
    found = _known(view)
    if found is None or view.states is None:
        return np.zeros(len(view.context), np.bool_)
    wrong: Mask = found & (view.states.owner[view.plan.state_slot] != view.plan.sequence)
    return wrong


def torn(view: StepView) -> Mask:
    """Rows that do not begin where the state in their slot ends; where a snapshot is restored first, its length is what `snapshots` looks at."""
    found = _known(view)
    if found is None or view.states is None:
        return np.zeros(len(view.context), np.bool_)
    wrong: Mask = found & (view.states.length[view.plan.state_slot] != view.plan.start)
    if view.plan.restores.size:
        wrong &= ~np.isin(view.plan.state_slot, view.plan.restores[:, 1])
    return wrong


def given_holds(view: StepView) -> bool:
    """Every row has a state slot, or none has."""
    return not some(stateless(view))


def distinct_holds(view: StepView) -> bool:
    """No two rows have one state slot."""
    return not view.limits.num_state_slots or not some(sharing(view))


def owner_holds(view: StepView) -> bool:
    """No row has a stranger's state slot."""
    return not view.limits.num_state_slots or not some(disowned(view))


def length_holds(view: StepView) -> bool:
    """Every row begins where its state ends."""
    return not view.limits.num_state_slots or not some(torn(view))


def _known(view: StepView) -> Mask | None:
    """Rows with a state slot, of which there is more to say; None where nothing is known of state slots."""
    if view.states is None or not len(view.states.owner):
        return None
    found: Mask = view.plan.state_slot >= 0
    return found
