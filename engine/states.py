"""StatePool: which state slots are free, whose the others are, and how far each state has come. Not the states themselves, which executors hold.

A sequence of a model with Gated DeltaNet layers has a state slot as long as it has a batch slot. Its state is at one length only: a slot that is given
to somebody counts as empty, whatever lies in it, since a row that starts at 0 reads zeros instead.

Invariant, checked by `check` and by every property test: each slot 0..num_slots-1 is either free or owned by one sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import LawViolation
from twinfer.invariants.facts import StateSlots
from twinfer.plan import StepPlan

NOBODY = -1  # the owner of a slot that is free
NO_SLOT = -1  # the slot of a sequence whose model keeps no state


class StatePool:
    """`num_slots` 0: the model keeps no state, and every sequence's slot is NO_SLOT.

    owner   [num_slots] int64, from the ledger: the sequence, NOBODY where a slot is free
    length  [num_slots] int32, from the ledger: tokens behind the state when every launched step is over
    """

    def __init__(self, num_slots: int, owner: NDArray[np.int64], length: NDArray[np.int32]) -> None:
        self.num_slots = num_slots
        self.owner, self.length = owner, length
        self.reset()

    def reset(self) -> None:
        """Makes every slot free, whatever it was."""
        self._free = list(range(self.num_slots - 1, -1, -1))  # popped from the end: slot 0 first
        self.owner[:] = NOBODY
        self.length[:] = 0

    @property
    def available(self) -> bool:
        """Whether one more sequence can have a slot; always where none is needed."""
        return not self.num_slots or bool(self._free)

    @property
    def num_held(self) -> int:
        return self.num_slots - len(self._free)

    def free(self) -> tuple[int, ...]:
        """Slots that nobody has."""
        return tuple(self._free)

    def take(self, sequence: int) -> int:
        """Gives a sequence a slot that counts as empty, or NO_SLOT. The caller has checked `available`; asking for more is a LawViolation."""
        if not self.num_slots:
            return NO_SLOT
        if not self._free:
            raise LawViolation("state_pool", f"a state slot was asked for, all {self.num_slots} are taken")
        slot = self._free.pop()
        self.owner[slot], self.length[slot] = sequence, 0
        return slot

    def release(self, slot: int) -> None:
        """Takes a slot back; NO_SLOT is nothing."""
        if slot == NO_SLOT:
            return
        self.owner[slot] = NOBODY
        self._free.append(slot)

    def launched(self, plan: StepPlan) -> None:
        """A step was handed to the executor: each of its rows moves its state to its own end."""
        if self.num_slots:
            self.length[plan.state_slot] = plan.start + plan.length

    @property
    def slots(self) -> StateSlots:
        """What the auditor compares rows with: the very columns, as they are now and later."""
        return StateSlots(self.owner, self.length)
