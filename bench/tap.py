"""Reads an engine's logits while it runs and keeps, of each position, what a comparison needs. Works on either engine; it compares nothing.

Logits of a whole prompt over a real vocabulary take gigabytes; here they exist for max_logit_tokens positions at once, on the device, in float64 while
they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from twinfer.engine.engine import Engine
from twinfer.engine.flatten import FlatStep
from twinfer.golden.compare import Scores
from twinfer.golden.manifest import Recorded
from twinfer.plan import StepPlan
from twinfer.sampling import SamplingParams

Take: TypeAlias = Callable[[int, NDArray[np.int32], torch.Tensor], None]
"""(request id, ascending positions [n], logits [n, V] in a buffer that is reused)"""


@contextmanager
def tapped(engine: Engine, take: Take) -> Iterator[None]:
    """While inside, `take` sees the logits of every token that the engine computes, tile by tile and row by row."""
    executor: Any = engine.executor

    def show(plan: Any, flat: Any, first: int, logits: torch.Tensor) -> None:
        owner = {s.id: s.request_id for s in engine.scheduler.running()}
        indptr = flat.row_indptr.tolist()
        for row, sequence in enumerate(plan.sequence.tolist()):
            begin, end = max(indptr[row], first), min(indptr[row + 1], first + len(logits))
            if begin < end and sequence in owner:
                take(owner[sequence], flat.positions[begin:end].copy(), logits[begin - first : end - first])

    if hasattr(executor, "tap"):
        executor.tap = show
        try:
            yield
        finally:
            executor.tap = None
        return
    # The reference has no tap; its model is called from outside, and what its forward returns is what it samples from.
    forward, launch = executor.model.forward, executor.launch
    plans: list[StepPlan] = []

    def watched_launch(plan: StepPlan) -> None:
        plans[:] = [plan]
        launch(plan)

    def watched_forward(step: FlatStep, *others: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(step, *others)
        size = engine.limits.max_logit_tokens
        for first in range(0, len(hidden), size):
            show(plans[0], step, first, executor.model.logits(hidden[first : first + size]))
        return hidden

    executor.launch, executor.model.forward = watched_launch, watched_forward
    try:
        yield
    finally:
        executor.launch, executor.model.forward = launch, forward


def prefill(engine: Engine, prompts: Sequence[Sequence[int]], take: Take) -> None:
    """Runs the prompts, all at once as far as the limits allow; `take` sees each by its place in `prompts`. Raises RuntimeError where one fails."""
    names: dict[int, int] = {}
    with tapped(engine, lambda request, positions, logits: take(names[request], positions, logits)):
        for name, prompt in enumerate(prompts):
            names[engine.add([int(token) for token in prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))] = name
        while engine.has_work:
            for event in engine.step():
                if event.error is not None:
                    raise RuntimeError(f"prompt {names[event.request_id]}: {event.error}")


def record(engine: Engine, prompts: Sequence[Sequence[int]], num_top: int) -> list[Recorded]:
    """The engine's likeliest `num_top` tokens at every position of every prompt, as a golden for others."""
    vocab_size = engine.model.vocab_size
    kept = [_Kept(np.arange(len(prompt)), num_top) for prompt in prompts]

    def take(name: int, positions: NDArray[np.int32], logits: torch.Tensor) -> None:
        wide = logits.double()
        logsumexp = wide.logsumexp(-1)
        values, ids = wide.topk(num_top, dim=-1)
        kept[name].put(positions, ids, values - logsumexp[:, None], logsumexp, ids[:, 0])

    prefill(engine, prompts, take)
    return [Recorded(vocab_size, k.positions, k.ids, k.logprobs, k.logsumexp, k.top1_ids) for k in map(_Kept.whole, kept)]


def score(engine: Engine, prompts: Sequence[Sequence[int]], goldens: Sequence[Recorded]) -> list[Scores]:
    """What the engine gives at each golden's positions and tokens."""
    kept = [_Kept(golden.positions, golden.top_ids.shape[1]) for golden in goldens]

    def take(name: int, positions: NDArray[np.int32], logits: torch.Tensor) -> None:
        golden = goldens[name]
        _, rows, picked = np.intersect1d(golden.positions, positions, return_indices=True)
        if not len(rows):
            return
        wide = logits[torch.from_numpy(picked).to(logits.device)].double()
        logsumexp = wide.logsumexp(-1)
        ids = torch.from_numpy(golden.top_ids[rows]).to(logits.device)
        kept[name].put(golden.positions[rows], ids, wide.gather(1, ids) - logsumexp[:, None], logsumexp, wide.argmax(-1))

    prefill(engine, prompts, take)
    return [Scores(k.logprobs, k.logsumexp, k.top1_ids) for k in map(_Kept.whole, kept)]


class _Kept:
    """What is known of one prompt's `positions` [P], ascending; NaN and -1 where nothing came yet."""

    def __init__(self, positions: NDArray[Any], num_top: int) -> None:
        self.positions = positions.astype(np.int64)
        self.ids = np.full((len(positions), num_top), -1, np.int64)
        self.logprobs = np.full((len(positions), num_top), np.nan)
        self.logsumexp = np.full(len(positions), np.nan)
        self.top1_ids = np.full(len(positions), -1, np.int64)

    def put(self, positions: NDArray[Any], ids: torch.Tensor, logprobs: torch.Tensor, logsumexp: torch.Tensor, top1_ids: torch.Tensor) -> None:
        at = np.searchsorted(self.positions, positions)
        for target, values in ((self.ids, ids), (self.logprobs, logprobs), (self.logsumexp, logsumexp), (self.top1_ids, top1_ids)):
            target[at] = values.cpu().numpy()

    def whole(self) -> _Kept:
        """Itself. Raises RuntimeError where a position was never computed."""
        missing = np.flatnonzero(self.top1_ids < 0)
        if len(missing):
            raise RuntimeError(f"{len(missing)} positions were not computed, the first of them {self.positions[missing[0]]}")
        return self
