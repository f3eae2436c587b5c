"""StepOutput: what an executor gives back for one plan, in host arrays. Not events: turning tokens into text and endings is the engine's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log probabilities (nats, of the raw logits) at `num` positions.

    logprob    [num] float64, of the token that was sampled or given
    top_ids    [num, k] int32, best first, lowest id of a tie first; k is the largest number that the plan asks of any row
    top_logprobs [num, k] float64
    """

    logprob: NDArray[np.float64]
    top_ids: I32
    top_logprobs: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """Tokens of one step.

    step      the plan's number
    tokens    [sum num_samples] int32, sampled tokens, rows one after another
    sampled   log probabilities at sampled positions, [sum num_samples]; None when no row asks
    scored    log probabilities at scored positions, [sum num_scored]; None when no row asks
    row_error  row index -> what went wrong with that row alone (for instance a logit that is not a number); its tokens mean nothing
    """

    step: int
    tokens: I32
    sampled: LogprobColumns | None
    scored: LogprobColumns | None
    row_error: dict[int, str]
