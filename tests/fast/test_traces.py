"""Traces travel to the fast executor: what the reference engine planned and answered, saved and loaded, has the same answers there. Micro model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import twinfer.reference
from tests.fast.pair import DEVICE, SMALL, compare_outputs, keep_outputs
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.trace import Trace
from twinfer.fast.executor import FastExecutor
from twinfer.golden import MICRO
from twinfer.invariants.ledger import Ledger
from twinfer.output import StepOutput
from twinfer.sampling import SamplingParams


def test_a_trace_of_the_reference_engine_replays_on_the_fast_executor(tmp_path: Path) -> None:
    reference = twinfer.reference.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits=SMALL, audit="full")
    reference.trace = Trace(reference.limits)
    outputs: dict[int, StepOutput] = {}
    keep_outputs(reference, outputs)
    text = list(b"Once more unto the breach, dear friends, once more")
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    reference.generate([text[:20], text[30:36]], [greedy, replace(greedy, temperature=1.0, seed=3, presence_penalty=0.3)])
    reference.generate([text[:18]], replace(greedy, max_tokens=2))
    assert reference.scheduler.num_prefix_hits == 16
    reference.trace.save(tmp_path / "run.npz")

    trace, checkpoint = Trace.load(tmp_path / "run.npz"), Checkpoint.open(MICRO)
    ledger = Ledger(trace.limits, checkpoint.config, "float32")
    executor = FastExecutor(checkpoint.config, trace.limits, checkpoint.weights(torch.float32, DEVICE), ledger, graphs=True)
    answers = trace.replay(executor)
    assert len(answers) == len(outputs) >= 7
    for plan, got in zip(trace.plans, answers, strict=True):
        assert not got.row_error
        compare_outputs(plan, got, outputs[plan.step], sound=np.ones(plan.num_rows, bool))
    assert {(int(slot), page) for slot, page in _table(executor)} == {(int(slot), page) for slot, page in _table(reference.executor)}


def _table(executor: object) -> list[tuple[int, tuple[int, ...]]]:
    """Page lists by slot, as the executor's host has them."""
    buffers = executor.buffers()  # type: ignore[attr-defined]
    return [(slot, tuple(buffers["page_table"][slot, :count].tolist())) for slot, count in enumerate(buffers["page_counts"].tolist())]
