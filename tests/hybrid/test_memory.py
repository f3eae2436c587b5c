"""The workspace that the hybrid reference model's docstring states, against what torch's profiler sees a step allocate."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.model.test_memory import PAGE_SIZE, STEPS, peak_bytes
from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import random_weights
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.qwen3 import wide_dtype

from .driver import Driver, Sequence
from .shapes import KINDS

SMALL: dict[str, Any] = {  # of everything but what a shape below makes large
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "intermediate_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
    "states": {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "channels": {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64},
    "hidden": {"hidden_size": 512},
    "mlp": {"intermediate_size": 2000, "mlp_only_layers": [0]},
    "many_experts": {"num_experts": 512},
    "wide_experts": {"num_experts_per_tok": 4, "moe_intermediate_size": 600},
    "wide_shared_expert": {"shared_expert_intermediate_size": 1200},
}


def bound(config: ModelConfig, dtype: torch.dtype, rows: list[tuple[int, int]]) -> int:
    b, w = dtype.itemsize, wide_dtype(dtype).itemsize
    h, H, K, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    T = sum(length for _, length in rows)
    by_row = 0
    for start, L in rows:
        P, S = -(-(start + L) // PAGE_SIZE) * PAGE_SIZE, start + L
        by_row = max(by_row, H * L * S * (2 * b + 2 * w) + 3 * L * S + 2 * b * d * (K * P + H * S) + 16 * (L + P))
    parts = [T * (b * (9 * H + 6 * K) * d + w * 3 * H * d) + by_row, T * b * 3 * config.intermediate_size]
    if config.gdn is not None:
        nv, dk, dv, C = config.gdn.num_value_heads, config.gdn.key_head_dim, config.gdn.value_head_dim, config.gdn.conv_dim
        parts.append(T * (b * (5 * C + 4 * nv * dv) + w * nv * (5 * dk + 4 * dv + 4)) + 5 * w * nv * dk * dv + b * config.gdn.conv_kernel * C)
    if config.experts is not None:
        E, k, m, s = config.experts.num_experts, config.experts.num_per_token, config.experts.intermediate_size, config.experts.shared_intermediate_size
        parts.append(T * (E * (b + 3 * w + 8) + b * (4 * h + 5 * m + 3 * (s or 0)) + 40 * k))
    return T * (b * (4 * h + 2 * config.rotary_dim) + w * (3 * h + 4 * config.rotary_dim)) + max(parts)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# The type that has everything, and the one that has attention everywhere; not every dtype with every shape.
CASES = [("qwen3_next", shape, step, dtype) for shape in SHAPES for step in STEPS for dtype in ("float32", "bfloat16")]
CASES += [("qwen3_moe", shape, step, "float64") for shape in ("attention", "wide_experts") for step in STEPS]


@pytest.mark.parametrize(("name", "shape", "step", "dtype"), CASES)
def test_step_workspace(name: str, shape: str, step: str, dtype: str) -> None:
    fields = {**KINDS[name].shape, **SMALL, **SHAPES[shape], **({} if name == "qwen3_next" else {"rope_parameters": None, "layer_types": None})}
    config = ModelConfig.from_dict(json.loads(KINDS[name].config(**fields).to_json_string(use_diff=False)))
    model, rows = Hybrid(config, random_weights(config, 0, DTYPES[dtype])), STEPS[step]
    driver, sequences = Driver(model, PAGE_SIZE, num_pages=80), [Sequence(slot=i) for i, _ in enumerate(rows)]
    if any(start for start, _ in rows):
        driver.step([(sequence, [1] * start) for sequence, (start, _) in zip(sequences, rows, strict=True) if start])
    flat = driver.flat([(sequence, [1] * length) for sequence, (_, length) in zip(sequences, rows, strict=True)])
    slots = [sequence.slot for sequence in sequences]
    # oneDNN, which some processors take for bfloat16, keeps packed copies of its own; what is stated is what the model itself holds.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        found = peak_bytes(lambda: model.forward(flat, driver.cache, driver.states, slots))
    limit = bound(config, model.dtype, rows)
    assert limit / 3.5 < found <= limit, f"{found / limit:.3f} of the bound"
