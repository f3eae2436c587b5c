"""Order: the running sequences in order of admission, and what stays the same from step to step while nobody comes or goes. A cache, no policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.columns import shared

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Columns of a step in which every running sequence decodes, all read-only; a plan that holds these very objects need not have them checked again.

    slots [n] int32, identity [n] int64, scored_logprobs, state_slot [n] int32; ones, zeros [n] int32
    scores    whether any of them wants prompt log probabilities
    """

    slots: I32
    identity: NDArray[np.int64]
    scored_logprobs: I32
    state_slot: I32
    ones: I32
    zeros: I32
    scores: bool

    @classmethod
    def of(cls, slots: list[int], identity: NDArray[np.int64], scored_logprobs: I32, state_slot: I32) -> Order:
        """`slots` first to last; the others are arrays by slot."""
        at = shared(np.array(slots, np.int32))
        scored = shared(scored_logprobs[at])

        def constant(value: int) -> NDArray[Any]:
            return shared(np.full(len(slots), value, np.int32))

        return cls(at, shared(identity[at]), scored, shared(state_slot[at]), constant(1), constant(0), bool((scored >= 0).any()))
