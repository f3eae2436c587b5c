"""Sliding windows under the whole engine: prefix hits, chunks and preemption give the solo run's logits to 1e-9 in fp64. Random tiny models.

A hit skips prompt tokens whose keys the window may have left behind; a chunk's first query sees less than its last. The solo run is compared with
transformers in tests/model; here it is the oracle.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import random_weights
from twinfer.engine.engine import Engine
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits, ceil_div
from twinfer.reference.executor import ReferenceExecutor
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .recorder import F64, Recorder, log_softmax

VOCAB = 61
MAX_CONTEXT = 72
MAX_NEW = 9
WINDOWS: dict[str, dict[str, Any]] = {
    "all layers, 5": {"sliding_window": 5, "max_window_layers": 0},
    "layers 1 and 2, 16": {"sliding_window": 16, "max_window_layers": 1},
    "in turn, 9": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "one token": {"sliding_window": 1, "max_window_layers": 2},
    "none": {},
}
_RANDOM = random.Random(4)
SHARED = tuple(_RANDOM.randrange(VOCAB) for _ in range(56))
PROMPTS = (SHARED, SHARED[:17], (*SHARED[:40], 1, 2, 3), SHARED[:33], SHARED[:8], (*SHARED[:16], *(5,) * 20), (7,))


def config(window: str) -> ModelConfig:
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    return ModelConfig.from_dict({"model_type": "qwen3", **shape, **heads, "use_sliding_window": window != "none", **WINDOWS[window]}, window)


def run(window: str, order: tuple[int, ...], prefix_cache: bool, arrivals: int = 100, **values: int) -> tuple[Engine, Recorder, dict[int, list[int]]]:
    """Greedy answers to the prompts numbered in `order`; tokens by place in it, which is the sequence id."""
    model, made = config(window), {"max_batch": 1, "max_step_tokens": MAX_CONTEXT, "page_size": 8, **values}
    limits = Limits(
        **{
            "max_chunk_tokens": made["max_step_tokens"],
            "warmup_tokens": 1,
            "max_context": MAX_CONTEXT,
            "max_step_context": made["max_batch"] * MAX_CONTEXT,
            "max_logit_tokens": 3,
            "num_pages": made["max_batch"] * ceil_div(MAX_CONTEXT, made["page_size"]),
            **made,
        }
    )
    ledger = Ledger(limits, model, "float64")
    executor = ReferenceExecutor(model, limits, random_weights(model, 3, torch.float64), ledger)
    engine = Engine(executor, model, limits, ledger=ledger, prefix_cache=prefix_cache, audit="full")
    recorder = Recorder(engine)  # type: ignore[arg-type]
    tokens: dict[int, list[int]] = {}
    left = list(order)
    while left or engine.has_work:
        for index in left[:arrivals]:
            tokens[engine.add(Request(PROMPTS[index], SamplingParams(temperature=0.0, max_tokens=MAX_NEW)))] = []
        del left[:arrivals]
        for event in engine.step():
            tokens[event.request_id] += event.tokens
    assert engine.scheduler.pool.num_held == 0
    return engine, recorder, tokens


@cache
def solo(window: str, index: int) -> tuple[F64, tuple[int, ...]]:
    """Log probabilities at every position and the answer of one prompt alone, whole, without a cache."""
    _, recorder, tokens = run(window, (index,), False)
    return log_softmax(recorder.of(0)), tuple(tokens[0])


def check(window: str, order: tuple[int, ...], recorder: Recorder, tokens: dict[int, list[int]], what: str) -> None:
    for place, index in enumerate(order):
        expected, answer = solo(window, index)
        assert tuple(tokens[place]) == answer, f"{what}: prompt {index}"
        for position, versions in recorder.logits[place].items():
            for logits in versions:
                assert np.abs(log_softmax(logits) - expected[position]).max() <= 1e-9, f"{what}: prompt {index} position {position}"


def test_every_window_matters() -> None:
    """The models differ in nothing but the window, and give different logits once the context is longer than it, and the same before."""
    full, _ = solo("none", 0)
    for window, values in WINDOWS.items():
        if window != "none":
            difference = np.abs(solo(window, 0)[0] - full).max(-1)
            size = values["sliding_window"]
            assert difference[:size].max() <= 1e-9
            assert difference[size:].min() > 1e-3


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "none"])
def test_a_hit_at_every_page(window: str, page_size: int) -> None:
    """A warm prompt, then beginnings of it around every page boundary: the rows that are left to compute see what the window shows them."""
    engine, recorder, _ = run(window, (0,), True, page_size=page_size)
    whole, _ = solo(window, 0)
    compared = 0
    for length in sorted({n for k in range(page_size, len(SHARED), max(page_size, 4)) for n in (k, k + 1)}):
        (result,) = engine.generate([Request(SHARED[:length], SamplingParams(temperature=0.0, max_tokens=1))])
        assert result.num_cached_tokens == (length - 1) // page_size * page_size
        rows = recorder.logits[max(recorder.logits)]
        assert sorted(rows) == list(range(result.num_cached_tokens, length))
        for position, (logits,) in rows.items():
            assert np.abs(log_softmax(logits) - whole[position]).max() <= 1e-9, f"prompt of {length}, position {position}"
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "none"])
def test_any_schedule_gives_the_solo_logits(window: str) -> None:
    hits = preempted = chunked = 0
    for seed in range(4):
        pick = random.Random(f"{window}/{seed}")
        max_batch, page_size = pick.randint(2, 5), pick.choice([1, 4, 8, 16])
        step = pick.randint(max_batch, 40)
        limits = {"max_batch": max_batch, "page_size": page_size, "max_step_tokens": step, "max_chunk_tokens": pick.randint(min(3, step), step)}
        limits["num_pages"] = ceil_div(MAX_CONTEXT, page_size) + pick.randint(0, 2 * ceil_div(8, page_size))
        order = tuple(pick.choices(range(len(PROMPTS)), k=6))
        engine, recorder, tokens = run(window, order, True, pick.choice([1, 3, 100]), **limits)
        check(window, order, recorder, tokens, f"seed {seed}, {limits}")
        hits += engine.scheduler.num_prefix_hits
        preempted += engine.scheduler.num_preemptions
        chunked += sum(bool((plan.num_samples == 0).any()) for plan in recorder.plans)
    assert hits > 0
    assert preempted > 0
    assert chunked > 0
