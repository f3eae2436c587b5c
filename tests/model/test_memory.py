"""The workspace that the reference model's docstring states, against what torch's profiler sees a step allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import random_weights
from twinfer.reference.qwen3 import Qwen3, wide_dtype

from . import tiny
from .driver import Driver, Sequence

PAGE_SIZE = 16

SHAPES: dict[str, dict[str, Any]] = {
    "like_a_real_one": {},
    "wide_mlp": {"hidden_size": 256, "intermediate_size": 700, "num_attention_heads": 4, "num_key_value_heads": 4},
    "many_heads": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 16, "head_dim": 64},
    "windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
}
# tokens already in cache, and tokens of the step, by row
STEPS: dict[str, list[tuple[int, int]]] = {
    "prefill": [(0, 300)],
    "chunk": [(250, 100)],
    "decode": [(70, 1)] * 8,
    "mixed": [(70, 100), (400, 1), (3, 1)],
    "one": [(0, 1)],
}


def peak_bytes(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    now = peak = 0
    for event in sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert kept is not None
    return peak


def bound(config: ModelConfig, dtype: torch.dtype, rows: list[tuple[int, int]]) -> int:
    b, w = dtype.itemsize, wide_dtype(dtype).itemsize
    h, H, K, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    tokens = sum(length for _, length in rows)
    by_token = b * (4 * h + 4 * (H + K) * d + 3 * config.intermediate_size) + w * (3 * max(h, H * d) + 4 * d)
    by_row = 0
    for start, L in rows:
        P = -(-(start + L) // PAGE_SIZE) * PAGE_SIZE
        S = start + L if config.windows[0] is None else min(start + L, L + config.windows[0] - 1)
        by_row = max(by_row, H * L * S * (2 * b + 2 * w) + 3 * L * S + 2 * b * d * (K * P + H * S) + 16 * (L + P))
    return tokens * by_token + by_row


@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_step_workspace(shape: str, step: str, dtype: str) -> None:
    config = ModelConfig.from_dict({"model_type": "qwen3", **tiny.SHAPE, **SHAPES[shape]})
    model, rows = Qwen3(config, random_weights(config, 0, tiny.DTYPES[dtype])), STEPS[step]
    driver, sequences = Driver(model, PAGE_SIZE, num_pages=80), [Sequence() for _ in rows]
    if any(start for start, _ in rows):
        driver.step([(sequence, [1] * start) for sequence, (start, _) in zip(sequences, rows, strict=True) if start])
    flat = driver.flat([(sequence, [1] * length) for sequence, (_, length) in zip(sequences, rows, strict=True)])
    # oneDNN, which some processors take for bfloat16, keeps packed copies of its own; what is stated is what the model itself holds.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        found = peak_bytes(lambda: model.forward(flat, driver.cache))
    limit = bound(config, model.dtype, rows)
    assert limit / 3 < found <= limit, f"{found / limit:.3f} of the bound"
