"""The equality gate of a comparison: two engines must give the same log probabilities on the inputs that are timed. Not a timing, not a test suite.

A fast wrong engine is of no interest, so a comparison asks for its pair's gate first (conftest.py) and fails where the gate has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinfer.engine.engine import Engine
from twinfer.request import TokenLogprob
from twinfer.sampling import SamplingParams

# fp32 on both sides; two right implementations differ by about 3e-5 nat, the weakest of 13 injected faults by 3e-2.
TOLERANCE_NAT = 1e-4
NUM_TOP = 5


class GateFailed(AssertionError):
    """The pair differs, or nothing was compared: no figure of it means anything."""


@dataclass(frozen=True, slots=True)
class Equality:
    """The largest difference of a log probability, over so many positions."""

    pair: str
    num_positions: int
    max_nat: float

    def check(self, tolerance: float = TOLERANCE_NAT) -> Equality:
        """Itself. Raises GateFailed unless something was compared and all of it is within `tolerance`."""
        if self.num_positions == 0:
            raise GateFailed(f"{self.pair}: no position was compared")
        if not self.max_nat <= tolerance:  # also when it is not a number
            raise GateFailed(f"{self.pair}: log probabilities differ by {self.max_nat:.3g} nat over {self.num_positions} positions, limit {tolerance:g}")
        return self


def compare_with_transformers(engine: Engine, model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Equality:
    """Our log probabilities of every prompt token and of `max_tokens` generated ones, all prompts in one batch, against `model` on each sequence alone.

    At each position the given token and our likeliest few are compared, in float64.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    positions, worst = 0, 0.0
    for result in engine.generate([tuple(p) for p in prompts], params):
        ours = (*(result.prompt_logprobs or ()), *(result.completions[0].logprobs or ()))
        tokens = (*result.prompt, *result.completions[0].tokens)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens[:-1]], device=model.device)).logits[0]
        theirs = logits.double().log_softmax(-1).cpu()
        if len(ours) != len(theirs):
            raise GateFailed(f"reference / transformers: {len(ours)} positions of ours, {len(theirs)} of transformers")
        positions += len(ours)
        worst = max(worst, _difference(ours, theirs))
    return Equality("reference / transformers", positions, worst)


def _difference(ours: Sequence[TokenLogprob], theirs: torch.Tensor) -> float:
    """Largest difference at the tokens that we report. theirs [positions, vocab_size]; a figure that is not a number counts as infinite."""
    ids = torch.tensor([[o.token, *(token for token, _ in o.top)] for o in ours])  # [positions, 1 + NUM_TOP]
    values = torch.tensor([[o.logprob, *(value for _, value in o.top)] for o in ours], dtype=torch.float64)
    return float((values - theirs.gather(1, ids)).abs().nan_to_num(nan=torch.inf).max())
