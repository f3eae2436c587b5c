"""Subject: an engine that computes, what is kept of its logits, and how two such things are compared. Not a test; it drives nothing.

The reference runs in float64 and is held to 1e-9. The fast engine is held to the bit, by digests: on a GPU in bfloat16 (TEST_DEVICE=cuda), and in the
interpreter in float32 with sums in a fixed order (tests/kernels/order.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import twinfer.fast
import twinfer.reference
from twinfer.bench.tap import tapped
from twinfer.engine.engine import Engine
from twinfer.golden import MICRO
from twinfer.invariants.gates.law2 import digests
from twinfer.limits import Limits
from twinfer.request import Request
from twinfer.sampling import SamplingParams

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
TOLERANCE = 1e-9  # of the reference's log probabilities in float64, as in tests/reference/test_schedules.py
MAX_CONTEXT = 32
MAX_NEW = 8  # tokens that a solo run generates: max_tokens, and those of rows that were launched before the end was read

Evidence = Any
"""What is kept of one position's logits: a digest, or its log probabilities [V] float64."""


@dataclass(slots=True)
class Solo:
    """A request alone: its tokens, and evidence of every position of prompt and answer."""

    tokens: list[int]
    evidence: dict[int, Evidence]


@dataclass(slots=True)
class Subject:
    """One kind of engine over the micro model."""

    name: str
    open: Callable[[Limits, bool, bool], Engine]  # limits, prefix cache, graphs
    keep: Callable[[torch.Tensor], list[Evidence]]
    same: Callable[[Evidence, Evidence], bool]
    _alone: Engine | None = None
    _solos: dict[tuple[tuple[int, ...], int | None], Solo] = field(default_factory=dict)

    def solo(self, prompt: tuple[int, ...], params: SamplingParams) -> Solo:
        """The oracle: one request, nothing cached, the prompt whole, every step launched and read before the next is planned."""
        key = (prompt, params.seed if params.temperature else None)
        params = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=min(MAX_NEW, MAX_CONTEXT - len(prompt)), ignore_eos=True)
        found = self._solos.get(key)
        if found is None:
            if self._alone is None:
                self._alone = self.open(Limits(
                    max_batch=1, max_step_tokens=MAX_CONTEXT, max_chunk_tokens=MAX_CONTEXT, warmup_tokens=1, max_context=MAX_CONTEXT,
                    max_step_context=MAX_CONTEXT, max_logit_tokens=8, page_size=16, num_pages=2,
                ), False, False)  # fmt: skip
            with watched(self, self._alone) as seen:
                request = self._alone.add(Request(prompt, params))
                tokens: list[int] = []
                while self._alone.has_work:
                    for event in self._alone.step():
                        assert event.error is None, event.error
                        tokens += event.tokens
            found = self._solos[key] = Solo(tokens, {position: each for (_, position), [each] in seen.items()})
            assert sorted(found.evidence) == list(range(len(prompt) + len(tokens) - 1)), request
        return found


@contextmanager
def watched(subject: Subject, engine: Engine) -> Iterator[dict[tuple[int, int], list[Evidence]]]:
    """Evidence by (request, position), a position once for each time that it is computed, while inside."""
    seen: dict[tuple[int, int], list[Evidence]] = {}

    def take(request: int, positions: NDArray[np.int32], logits: torch.Tensor) -> None:
        for position, evidence in zip(positions.tolist(), subject.keep(logits), strict=True):
            seen.setdefault((request, position), []).append(evidence)

    with tapped(engine, take):
        yield seen


def reference() -> Subject:
    def opened(limits: Limits, prefix_cache: bool, graphs: bool) -> Engine:
        return twinfer.reference.Engine.from_pretrained(
            MICRO, dtype="float64", device=DEVICE, limits=limits, prefix_cache=prefix_cache, audit="full", tokenizer=False
        )

    def keep(logits: torch.Tensor) -> list[Evidence]:
        return list(logits.double().log_softmax(-1).cpu().numpy())

    def same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
        return bool(np.abs(one - other).max() <= TOLERANCE)  # NaN is not within it

    return Subject("reference", opened, keep, same)


def fast() -> Subject:
    def opened(limits: Limits, prefix_cache: bool, graphs: bool) -> Engine:
        return twinfer.fast.Engine.from_pretrained(
            MICRO, dtype="bfloat16" if DEVICE == "cuda" else "float32", device=DEVICE, limits=limits, prefix_cache=prefix_cache, audit="full",
            tokenizer=False, graphs=graphs,
        )  # fmt: skip

    return Subject("fast", opened, digests, lambda one, other: bool(one == other))


def different(subject: Subject, solo: Solo, seen: Sequence[tuple[int, Evidence]]) -> list[int]:
    """Positions whose evidence is not the solo run's. Every one must be a position that the solo run computed."""
    return [position for position, evidence in seen if position not in solo.evidence or not subject.same(evidence, solo.evidence[position])]
