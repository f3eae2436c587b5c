"""Judge: holds answers against the oracle within a dtype's tolerances. Gives a record of numbers; where the answers come from is the gates' affair.

The tolerances, in nat:
float64   1e-9: the same arithmetic in another order; the reference differs by 3e-14 over all gates
float32   1e-3, the logic gate: the reference differs by 3e-4 at most, the weakest of 13 faults injected into a larger model gave 3e-2
bfloat16  no fixed number: multiples of what HF's own bfloat16 differs by from HF's float32, as the checkpoint's manifest records it
float16   a quarter of bfloat16's: it keeps three bits more, and the reference's differences are a seventh
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinfer.golden.compare import Tolerance
from twinfer.invariants.gates.adapter import Answer, Ask
from twinfer.invariants.gates.oracle import Oracle

# Multiples of the recorded floor. A single figure of few positions scatters, so `max` and `regret` (which one token can decide) may be twice the largest
# difference that the record holds; the mean and the 99th percentile are those of the numerics gate (golden.compare).
OF_MAX = 2.0
OF_MEAN = 1.5
FLOAT16_SHARE = 0.25


class GateFailed(AssertionError):
    """An engine did not do what a gate asks: its answer, its accounting, or that it answered at all."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What was found over all positions of some answers, in nat. `max`, `mean` and `p99` are of |log probability - the oracle's|; None without logprobs.

    regret  largest log probability that a token lies below the likeliest one in its place
    """

    num_positions: int
    regret: float
    max: float | None
    mean: float | None
    p99: float | None
    worst: str

    def __str__(self) -> str:
        figures = [f"{name} {value:.3g}" for name in ("max", "mean", "p99", "regret") if (value := getattr(self, name)) is not None]
        return f"{self.num_positions} positions: {', '.join(figures)} nat; worst at {self.worst}"

    def check(self, limits: Tolerance) -> Judged:
        """Itself, or GateFailed with the figures. A NaN is beyond every limit."""
        pairs = ((self.max, limits.max), (self.mean, limits.mean), (self.p99, limits.p99), (self.regret, limits.regret))
        if not all(value is None or limit is None or value <= limit for value, limit in pairs):
            raise GateFailed(f"{self}; limits: {limits}")
        return self


@dataclass(slots=True)
class Tally:
    """Positions one by one; `judged` sums them up."""

    regrets: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    worst: tuple[float, str] = (-1.0, "none")

    def add(self, where: str, regret: float, difference: float | None) -> None:
        self.regrets.append(regret)
        if difference is not None:
            self.differences.append(difference)
        size = max(regret, difference or 0.0) if not np.isnan([regret, difference or 0.0]).any() else np.inf
        if size > self.worst[0]:
            self.worst = (size, where)

    def judged(self) -> Judged:
        """Raises GateFailed if nothing was compared."""
        if not self.regrets:
            raise GateFailed("no position was compared")
        # max() of Python loses a NaN that is not first; numpy's keeps it.
        each = np.array(self.differences)
        largest, mean, p99 = (float(each.max()), float(each.mean()), float(np.percentile(each, 99))) if len(each) else (None, None, None)
        return Judged(len(self.regrets), float(np.max(self.regrets)), largest, mean, p99, self.worst[1])


class Judge:
    """Judges an engine's answers. `dtype` is the one that the engine computes in."""

    def __init__(self, oracle: Oracle, dtype: str) -> None:
        self.oracle = oracle
        self.vocab_size = int(oracle.goldens.manifest["model"]["vocab_size"])
        self.many, self.few = tolerances(dtype, oracle.goldens.manifest["noise_floor"]["bf16_against_fp32"])

    def judge(self, asks: Sequence[Ask], answers: Sequence[Answer]) -> Judged:
        """Raises GateFailed unless every token of every answer is (all but) the likeliest in its place, and its log probability right."""
        tally = Tally()
        for i, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            if not all(0 <= token < self.vocab_size for token in answer.tokens):
                raise GateFailed(f"request {i}: tokens {list(answer.tokens)}, ids are 0 to {self.vocab_size - 1}")
            scores = self.oracle.score(ask.prompt, answer.tokens)
            for at, (own, best) in enumerate(zip(scores.logprobs, scores.best, strict=True)):
                difference = None if answer.logprobs is None else abs(answer.logprobs[at] - own)
                tally.add(f"request {i} (prompt of {len(ask.prompt)}), generated token {at}", best - own, difference)
        return tally.judged().check(self.few)


def tolerances(dtype: str, floor: Mapping[str, Any]) -> tuple[Tolerance, Tolerance]:
    """Limits for (hundreds of positions, a scenario's few). `floor`: the checkpoint's record of HF's bfloat16 against HF's float32."""
    exact = {"float64": 1e-9, "float32": 1e-3}.get(dtype)
    if exact is not None:
        # Of two tokens whose log probabilities are each off by `exact`, the second best may be taken.
        both = Tolerance(dtype, max=exact, regret=2 * exact)
        return both, both
    share = FLOAT16_SHARE if dtype == "float16" else 1.0
    largest, mean, p99 = share * OF_MAX * floor["max"], share * OF_MEAN * floor["mean"], share * OF_MEAN * floor["p99"]
    many = Tolerance(f"{dtype}, many positions", max=largest, mean=mean, p99=p99, regret=largest)
    return many, Tolerance(f"{dtype}, few positions", max=largest, regret=largest)
