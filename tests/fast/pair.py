"""Pair: a fast engine, and a reference executor that computes the very plans that the fast one launched. Not a test; it compares, the tests say what runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import twinfer.fast
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.engine import Engine
from twinfer.engine.trace import Trace
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import StepPlan
from twinfer.reference.executor import ReferenceExecutor
from twinfer.request import Event
from twinfer.sampling import SamplingParams

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
GATE = 1e-3  # nat
SMALL = {"max_batch": 4, "max_step_tokens": 16, "max_chunk_tokens": 16, "max_context": 96, "page_size": 16, "num_pages": 24}

Ask = tuple[list[int], SamplingParams]


@dataclass(slots=True)
class Compared:
    """What one comparison saw: positions whose log probabilities were compared, and their largest difference in nat."""

    num_steps: int = 0
    num_positions: int = 0
    largest: float = 0.0
    row_errors: dict[int, str] = field(default_factory=dict)  # sequence id -> the fast engine's words


class Pair:
    """Make one for a module: opening costs more than a step. float32; `limits` over SMALL.

    engine   the fast engine, audited fully; its executor's tap keeps every token's logits until `compare`
    """

    def __init__(self, model: Path, *, graphs: bool, tokenizer: bool = True, **limits: int) -> None:
        self.engine = twinfer.fast.Engine.from_pretrained(
            model, dtype="float32", device=DEVICE, limits={**SMALL, **limits}, audit="full", graphs=graphs, tokenizer=tokenizer
        )
        self.limits: Limits = self.engine.limits
        self.reference = reference_executor(model, self.limits)
        self._compared = 0
        self._failed: set[int] = set()
        self._logits: dict[int, list[torch.Tensor]] = {}
        self._outputs: dict[int, StepOutput] = {}
        self.engine.trace = Trace(self.limits)
        self.engine.executor.tap = self._keep_logits
        keep_outputs(self.engine, self._outputs)
        self._hidden = keep_hidden(self.reference)

    def _keep_logits(self, plan: StepPlan, flat: Any, first: int, logits: torch.Tensor) -> None:
        self._logits.setdefault(plan.step, []).append(logits.cpu().clone())

    def serve(self, *asks: Ask, before_step: Callable[[int], None] | None = None) -> dict[int, list[Event]]:
        """Events of each request by id, all added before the first step. before_step(i) may do something to the engine."""
        events: dict[int, list[Event]] = {self.engine.add(prompt, params): [] for prompt, params in asks}
        step = 0
        while self.engine.has_work:
            if before_step is not None:
                before_step(step)
            for event in self.engine.step():
                events.setdefault(event.request_id, []).append(event)
            step += 1
        assert all(e[-1].terminal for e in events.values()), "every accepted request gets its terminal event"
        return events

    def new_plans(self) -> list[StepPlan]:
        """Plans launched since the last comparison."""
        assert self.engine.trace is not None
        return self.engine.trace.plans[self._compared :]

    def compare(self) -> Compared:
        """Runs what was launched since the last comparison on the reference and holds outputs and the logits of every token against each other."""
        found = Compared()
        plans = self.new_plans()
        self._compared += len(plans)
        for plan in plans:
            self._hidden.clear()
            self.reference.launch(plan)
            want = self.reference.collect()
            if plan.step not in self._outputs:  # it failed: its rows' keys are missing from the fast engine's cache for good
                self._failed |= set(plan.sequence.tolist())
                continue
            got = self._outputs.pop(plan.step)
            sound = np.array([sequence not in self._failed for sequence in plan.sequence.tolist()])
            errors = {row: what for row, what in got.row_error.items() if sound[row]}
            assert errors.keys() == {row for row in want.row_error if sound[row]}, f"step {plan.step}: {got.row_error} and {want.row_error}"
            found.row_errors |= {int(plan.sequence[row]): what for row, what in errors.items()}
            sound[list(errors)] = False
            compare_outputs(plan, got, want, sound)
            ours = torch.cat(self._logits.pop(plan.step))
            theirs = self.reference.model.logits(self._hidden[0]).cpu()
            keep = torch.from_numpy(np.repeat(sound, plan.length))
            difference = (ours.double().log_softmax(-1) - theirs.double().log_softmax(-1))[keep].abs()
            assert difference.isfinite().all()
            found.num_steps += 1
            found.num_positions += len(difference)
            found.largest = max(found.largest, float(difference.max()) if difference.numel() else 0.0)
        return found

    def close(self) -> None:
        self.engine.close()
        self.reference.close()


def keep_outputs(engine: Engine, outputs: dict[int, StepOutput]) -> None:
    """Has `engine` write down what its executor gives for each step."""
    executor: Any = engine.executor
    collect = executor.collect

    def kept() -> StepOutput:
        output: StepOutput = collect()
        outputs[output.step] = output
        return output

    executor.collect = kept


def reference_executor(model: Path, limits: Limits) -> ReferenceExecutor:
    """A reference executor in float32 that has run nothing."""
    checkpoint = Checkpoint.open(model)
    return ReferenceExecutor(checkpoint.config, limits, checkpoint.weights(torch.float32, DEVICE), Ledger(limits, checkpoint.config, "float32"))


def keep_hidden(executor: Any) -> list[torch.Tensor]:
    """A list to which a reference executor appends each step's hidden vectors, [tokens, h]."""
    kept: list[torch.Tensor] = []
    forward = executor.model.forward

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        kept.append(forward(*args, **kwargs))
        return kept[-1]

    executor.model.forward = watched
    return kept


def compare_outputs(plan: StepPlan, got: StepOutput, want: StepOutput, sound: Any) -> None:
    """Tokens equal, log probabilities within GATE where a row asks, for the rows that are `sound`."""
    owner = np.repeat(np.arange(plan.num_rows), plan.num_samples)
    kept = sound[owner]
    assert np.array_equal(got.tokens[kept], want.tokens[kept]), f"step {plan.step}: tokens {got.tokens} and {want.tokens}"
    scorer = np.repeat(np.arange(plan.num_rows), plan.num_scored)
    kinds = (("sampled", owner, plan.sampling.num_logprobs), ("scored", scorer, plan.scored_logprobs))
    for name, rows, asked in kinds:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), f"step {plan.step}: {name} log probabilities came from one engine alone"
        if a is not None:
            for i, row in enumerate(rows.tolist()):
                if sound[row] and asked[row] >= 0:
                    _compare_entry(a, b, i, int(asked[row]), f"step {plan.step}, {name} position {i}")


def _compare_entry(a: LogprobColumns, b: LogprobColumns, i: int, k: int, where: str) -> None:
    assert abs(a.logprob[i] - b.logprob[i]) <= GATE, where
    assert a.top_ids[i, :k].tolist() == b.top_ids[i, :k].tolist(), where
    assert np.abs(a.top_logprobs[i, :k] - b.top_logprobs[i, :k]).max(initial=0.0) <= GATE, where
