"""The equality gates of comparisons: two engines must give the same log probabilities on the inputs that are timed, a kernel what its plain form gives.
Not a timing, not a test suite.

A fast wrong engine is of no interest, so a comparison asks for its pair's gate first (conftest.py) and fails where the gate has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from twinfer.engine.engine import Engine
from twinfer.request import TokenLogprob
from twinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from twinfer.kernels.operation import Example, Operation

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


def compare_engines(reference: Engine, fast: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Equality:
    """Log probabilities of every prompt token and of `max_tokens` tokens that the reference generates, all in one batch, on both of our engines.

    The reference writes; then each sequence is a prompt of both. Compared are the given tokens and those that both have among their likeliest few.
    """
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    written = [[*result.prompt, *result.completions[0].tokens] for result in reference.generate([tuple(p) for p in prompts], greedy)]
    scoring = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    positions, worst = 0, 0.0
    for ours, theirs in zip(reference.generate(written, scoring), fast.generate(written, scoring), strict=True):
        pairs = zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
        for a, b in pairs:
            positions += 1
            mine, other = {a.token: a.logprob, **dict(a.top)}, {b.token: b.logprob, **dict(b.top)}
            differences = torch.tensor([mine[token] - other[token] for token in mine.keys() & other.keys()], dtype=torch.float64)
            worst = max(worst, float(differences.abs().nan_to_num(nan=torch.inf).max()))
    return Equality("reference / fast", positions, worst)


def check_operation(operation: Operation, example: Example, dtype: torch.dtype) -> float:
    """Runs both forms on copies of an example; the largest error of the kernel, relative to the largest value of an output. Raises GateFailed.

    The plain form runs in float64, or where the tolerance is 0 in the same dtype, and then every bit counts.
    """
    tolerance = operation.tolerance[str(dtype).removeprefix("torch.")]
    found = {name: tensor.clone() for name, tensor in example.tensors.items()}
    operation.triton(**found, **example.constants)
    want = {n: t.double() if tolerance and t.dtype.is_floating_point else t.clone() for n, t in example.tensors.items()}
    operation.plain(**want, **example.constants)
    worst = 0.0
    for name in example.outputs:
        got, right = found[name].double(), want[name].double()
        if not torch.equal(got.isnan(), right.isnan()):
            raise GateFailed(f"{operation.name}: {name} is not a number where the plain form's is, or the other way round")
        got, right = got.nan_to_num(0.0), right.nan_to_num(0.0)
        worst = max(worst, float((got - right).abs().max() / right.abs().max().clamp(min=1e-30)))
    if not worst <= tolerance:
        raise GateFailed(f"{operation.name}: the forms differ by {worst:.3g} of the largest value, tolerance {tolerance:g}")
    return worst


def _difference(ours: Sequence[TokenLogprob], theirs: torch.Tensor) -> float:
    """Largest difference at the tokens that we report. theirs [positions, vocab_size]; a figure that is not a number counts as infinite."""
    ids = torch.tensor([[o.token, *(token for token, _ in o.top)] for o in ours])  # [positions, 1 + NUM_TOP]
    values = torch.tensor([[o.logprob, *(value for _, value in o.top)] for o in ours], dtype=torch.float64)
    return float((values - theirs.gather(1, ids)).abs().nan_to_num(nan=torch.inf).max())
