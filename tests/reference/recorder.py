"""Records the logits of every computed token of an engine, by sequence and position. Not a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import twinfer.golden
from twinfer.engine.flatten import FlatStep
from twinfer.plan import StepPlan
from twinfer.reference import Engine

GOLDEN = Path(twinfer.golden.__file__).parent
DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # "cuda" runs the same gates on a GPU
F64 = NDArray[np.float64]


class Recorder:
    """logits[sequence id][position] -> [vocab_size] float64. A token that is computed twice (preemption, no hit) keeps every version."""

    def __init__(self, engine: Engine) -> None:
        self.logits: dict[int, dict[int, list[F64]]] = {}
        self.plans: list[StepPlan] = []
        executor: Any = engine.executor
        forward, launch = executor.model.forward, executor.launch

        def watched_launch(plan: StepPlan) -> None:
            self.plans.append(plan)
            launch(plan)

        def watched_forward(step: FlatStep, *rest: Any) -> torch.Tensor:
            hidden: torch.Tensor = forward(step, *rest)
            rows = executor.model.logits(hidden).double().cpu().numpy()
            plan = self.plans[-1]
            for row, sequence in enumerate(plan.sequence.tolist()):
                begin, start = int(step.row_indptr[row]), int(step.start[row])
                for i in range(int(plan.length[row])):
                    self.logits.setdefault(sequence, {}).setdefault(start + i, []).append(rows[begin + i])
            return hidden

        executor.launch, executor.model.forward = watched_launch, watched_forward

    def of(self, sequence: int) -> F64:
        """[positions computed, vocab_size] of a sequence whose every position was computed exactly once, in order."""
        rows = self.logits[sequence]
        assert sorted(rows) == list(range(len(rows)))
        assert all(len(versions) == 1 for versions in rows.values())
        return np.stack([rows[p][0] for p in range(len(rows))])


def log_softmax(logits: F64) -> F64:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def open_engine(model: str, dtype: str, **limits: int) -> Engine:
    """The bundled or the micro model, audited fully, with room for every golden."""
    values = {"max_batch": 1, "max_step_tokens": 4096, "max_context": 2560, "page_size": 16, "num_pages": 400, **limits}
    return Engine.from_pretrained(GOLDEN / model, dtype=dtype, limits=values, audit="full", device=DEVICE)


def teacher_forced(model: str, dtype: str, tokens: NDArray[np.int64], **limits: int) -> F64:
    """Logits [T, vocab_size] of a prompt, computed by the whole engine (pages, chunks, flatten) with one token generated after it."""
    from twinfer.sampling import SamplingParams

    engine = open_engine(model, dtype, **limits)
    recorder = Recorder(engine)
    engine.generate([tokens.tolist()], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return recorder.of(0)
