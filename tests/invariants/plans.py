"""A valid plan of three rows (a chunk, a prompt with its first token, a decode row) to break in one place at a time. Not a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from twinfer.limits import Limits
from twinfer.plan import SamplingColumns, StepPlan
from twinfer.table import PageTable, TableDelta

VOCAB = 50
LIMITS = Limits(
    max_batch=3,
    max_step_tokens=16,
    max_chunk_tokens=8,
    warmup_tokens=4,
    max_context=20,
    max_step_context=40,
    max_logit_tokens=4,
    page_size=4,
    num_pages=15,
    max_logprobs=2,
    max_logit_bias=3,
    buckets=(1, 2, 4),
)


def i32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def table() -> PageTable:
    """Slot 0 holds pages 1-2, slot 1 page 3, slot 2 pages 4-6; the delta of `plan` has been applied."""
    made = PageTable(np.zeros((3, 5), np.int32), np.zeros(3, np.int32))
    made.apply(TableDelta(0, i32(0, 0, 1, 2, 2, 2), i32(0, 1, 0, 0, 1, 2), i32(1, 2, 3, 4, 5, 6), i32(0, 1, 2), i32(2, 1, 3)))
    return made


def plan(**changes: Any) -> StepPlan:
    """Row 0: tokens 0..7 of a longer prompt, all scored. Row 1: 3 tokens, samples. Row 2: one token at position 9, samples, with bias and penalties."""
    f32 = np.float32
    sampling = SamplingColumns(
        temperature=np.array([1, 0, 1], f32),
        top_k=i32(0, 0, 5),
        top_p=np.ones(3, f32),
        min_p=np.zeros(3, f32),
        repetition=np.ones(3, f32),
        presence=np.zeros(3, f32),
        frequency=np.array([0, 0, 1], f32),
        seed=np.array([1, 2, 3], np.uint64),
        sample=i32(0, 0, 0),
        num_logprobs=i32(-1, 2, -1),
        bias_indptr=i32(0, 0, 0, 2),
        bias_ids=i32(7, 8),
        bias_values=np.array([1, -np.inf], f32),
        seen_indptr=i32(0, 0, 0, 3),
        seen_ids=i32(1, 2, 3),
        seen_counts=i32(0, 1, 2),
    )
    made = StepPlan(
        step=0,
        delta=TableDelta(0, i32(0, 0, 1, 2, 2, 2), i32(0, 1, 0, 0, 1, 2), i32(1, 2, 3, 4, 5, 6), i32(0, 1, 2), i32(2, 1, 3)),
        slot=i32(0, 1, 2),
        sequence=np.array([10, 11, 12], np.int64),
        start=i32(0, 0, 9),
        length=i32(8, 3, 1),
        num_samples=i32(0, 1, 1),
        num_scored=i32(8, 0, 0),
        state_slot=i32(-1, -1, -1),
        tokens=np.arange(12, dtype=np.int32),
        targets=np.arange(1, 9, dtype=np.int32),
        scored_logprobs=i32(1, -1, -1),
        sampling=sampling,
    )
    inside = {name: value for name, value in changes.items() if name in SamplingColumns.__dataclass_fields__}
    outside = {name: value for name, value in changes.items() if name not in inside}
    return replace(made, sampling=replace(sampling, **inside), **outside)
