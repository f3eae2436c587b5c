"""The formulas of `invariants` against what the kernels themselves ask for: shapes of scratch, task lists, rows that spread. No kernel runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from twinfer.bench.shapes import SHAPES, shape_config
from twinfer.invariants.bounds import BY_NAME, SAMPLING_SCRATCH
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.kernels.attention.schedule import spread_rows
from twinfer.kernels.attention.tasks import count_tasks
from twinfer.kernels.attention.tiles import tile, tile_tokens
from twinfer.kernels.sampling.sampler import scratch_shapes
from twinfer.limits import Limits

LIMITS = Limits(
    max_batch=200, max_step_tokens=4096, max_chunk_tokens=4096, warmup_tokens=1, max_context=9000, max_step_context=200 * 9000, max_logit_tokens=48,
    page_size=64, num_pages=30_000, look_ahead=1,
)  # fmt: skip


@pytest.mark.parametrize("vocab_size", [256, 4096, 4097, 151936])
def test_sampling_scratch_has_the_shapes_that_the_sampler_asks_for(vocab_size: int) -> None:
    model = dataclasses.replace(shape_config("qwen3-0.6b"), vocab_size=vocab_size)
    env = {**limit_env(LIMITS, model), **model_env(model)}
    bounds = {name: (BY_NAME[f"sampling_{name}"].dtype, BY_NAME[f"sampling_{name}"].axes(env)) for name in SAMPLING_SCRATCH}
    asked = scratch_shapes(LIMITS.max_logit_tokens, vocab_size)
    assert bounds == {name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in asked.items()}


@pytest.mark.parametrize("page_size", [1, 16, 64, 96, 128])
@pytest.mark.parametrize("name", list(SHAPES))
def test_the_workspace_holds_what_spread_rows_may_list(name: str, page_size: int) -> None:
    model, limits = shape_config(name), dataclasses.replace(LIMITS, page_size=page_size)
    env = {**limit_env(limits, model), **model_env(model)}
    group = model.num_heads // model.num_kv_heads
    tokens = tile_tokens(tile((9, 0), True, "bfloat16", model.head_dim, group), group)
    rows = spread_rows(limits.max_batch, model.num_kv_heads, page_size, 1, tokens)
    assert rows == env["spread_rows"]
    extent = limits.max_context + limits.look_ahead
    splits, tiles, *_ = BY_NAME["spread_tasks"].axes(env)
    listed = count_tasks(np.ones(rows, np.int32), np.full(rows, extent), tokens, True)
    assert listed == (splits * tiles, splits * tiles), "what such a step lists is all that the buffers hold"
