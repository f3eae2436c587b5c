"""Nothing is read that its own request did not write: before each step every other slot of the cache is filled with NaN, or with numbers that would show.

What lies in a recycled page, behind a row's last token, or behind a chunk, is somebody's past: a length that is a page too long reads it, and a page
that is not overwritten in time gives one request's text to another. Public engines did both (docs/known_faults.md). Micro model, fp64.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from twinfer.engine.flatten import FlatStep
from twinfer.reference import Engine, qwen3
from twinfer.request import GenerateResult
from twinfer.sampling import SamplingParams

from .recorder import DEVICE, GOLDEN

TEXT = list(b"The quality of mercy is not strain'd, It droppeth as the gentle rain from heaven upon the place beneath")
PARAMS = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, logprobs=0)
# Lengths at, below and above a page of 4 and a chunk of 8; some begin alike, so that hits leave rows of one page.
PROMPTS = tuple([TEXT[:n] for n in (3, 4, 5, 8, 20, 21)] + [TEXT[40 : 40 + n] for n in (1, 7, 9, 12)])
ROUNDS = (PROMPTS, PROMPTS[::-1])


def opened(**limits: int) -> Engine:
    values = {"max_context": 32, "page_size": 4, "max_chunk_tokens": 8, **limits}
    return Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits=values, audit="full", device=DEVICE)


def own_slots(engine: Engine) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which slots hold what somebody may read: tokens that a request with a slot has in cache, and sealed pages. [num_pages + 1, page_size]."""
    scheduler, size = engine.scheduler, engine.limits.page_size
    own = np.zeros((engine.limits.num_pages + 1, size), np.bool_)
    for page in range(1, engine.limits.num_pages + 1):
        own[page] = scheduler.prefix.digest_of(page) is not None
    for sequence in (*scheduler.running(), *scheduler.departing()):
        computed = scheduler.position(sequence)[0]
        for index, page in enumerate(scheduler.table.page_list(sequence.slot).tolist()):
            own[page, : max(0, computed - index * size)] = True
    return own


def poison(engine: Engine, value: float, reached: Counter[str]) -> None:
    """From now on every slot that is nobody's is overwritten before each step."""
    executor: Any = engine.executor
    forward = executor.model.forward

    def watched(step: FlatStep, kv: Any, observe: Any = None) -> torch.Tensor:
        stale = torch.from_numpy(~own_slots(engine))
        for tensor in (*kv.keys, *kv.values):
            reached["recycled"] += int((tensor[stale.to(tensor.device)].isfinite()).any())
            tensor[stale.to(tensor.device)] = value
        size = engine.limits.page_size
        reached["row ends on a page"] += int((step.context % size == 0).any())
        reached["row ends within a page"] += int((step.context % size > 0).any())
        reached["chunk"] += int((np.diff(step.row_indptr) > 1).any() and (step.start > 0).any())
        hidden: torch.Tensor = forward(step, kv, observe)
        return hidden

    executor.model.forward = watched


@cache
def solo() -> tuple[GenerateResult, ...]:
    """Each prompt in an engine that has done nothing else."""
    return tuple(opened(max_batch=1, num_pages=8, max_step_tokens=32, max_chunk_tokens=32).generate([prompt], PARAMS)[0] for prompt in PROMPTS)


@pytest.mark.parametrize("value", [float("nan"), 1e3])
@pytest.mark.parametrize("num_pages", [9, 24])
def test_what_others_left_is_never_read(num_pages: int, value: float) -> None:
    engine = opened(max_batch=4, max_step_tokens=16, num_pages=num_pages)
    reached: Counter[str] = Counter()
    poison(engine, value, reached)
    for prompts in ROUNDS:
        for prompt, result in zip(prompts, engine.generate([*prompts], PARAMS), strict=True):
            check(result, solo()[PROMPTS.index(prompt)])
    assert engine.scheduler.num_prefix_hits > 0
    assert (engine.scheduler.num_preemptions > 0) is (num_pages == 9)
    assert min(reached[name] for name in ("recycled", "row ends on a page", "row ends within a page", "chunk")) > 0, reached


def check(result: GenerateResult, alone: GenerateResult) -> None:
    assert result.completions[0].error is None
    assert result.tokens == alone.tokens
    ours, theirs = ([entry.logprob for entry in r.completions[0].logprobs or ()] for r in (result, alone))
    assert np.abs(np.array(ours) - np.array(theirs)).max() <= 1e-9


@pytest.mark.parametrize("value", [float("nan"), 1e3])
def test_a_length_that_is_one_token_too_long_is_seen(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a row that reads one token of what lies behind it, as a wrong last length makes it."""
    engine = opened(max_batch=4, max_step_tokens=16, num_pages=24)
    poison(engine, value, Counter())
    model: Any = engine.executor.model  # type: ignore[attr-defined]

    def one_too_many(i: int, row: int, q: torch.Tensor, step: FlatStep, kv: Any) -> torch.Tensor:
        pages = torch.from_numpy(step.page_indices[step.page_indptr[row] : step.page_indptr[row + 1]]).to(q.device, torch.int64)
        start, context = int(step.start[row]), int(step.context[row])
        k, v = kv.gather(i, pages, min(context + 1, len(pages) * engine.limits.page_size))
        seen = qwen3.visible(torch.arange(start, context, device=q.device), torch.arange(len(k), device=q.device), None)
        seen[-1] = True
        return qwen3.attend(q, k, v, seen, engine.model.head_dim**-0.5)

    monkeypatch.setattr(model, "_attend_row", one_too_many)
    results = engine.generate([*PROMPTS], PARAMS)
    wrong_ones = sum(result.completions[0].error is not None or result.tokens != alone.tokens for result, alone in zip(results, solo(), strict=True))
    assert wrong_ones > 0
