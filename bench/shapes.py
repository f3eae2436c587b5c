"""Shapes of the real dense Qwen3 models as config.json contents, to be run with random weights. No weights and no checkpoint reading here.

Source: the published configurations of the Qwen3 release; tests/bench/test_workloads.py checks them against the published parameter counts.
"""

from __future__ import annotations

import re
from typing import Any

from twinfer.config import ModelConfig


def _dense(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense(1024, 3072, 28, 16, True),
    "qwen3-4b": _dense(2560, 9728, 36, 32, True),
    "qwen3-8b": _dense(4096, 12288, 36, 32, False),
    "qwen3-32b": _dense(5120, 25600, 64, 64, False),
}


def shape_source(name: str) -> dict[str, Any] | None:
    """config.json of the shape `name`, or of its first layers: "qwen3-32b-2layers" is what of a model too large for two dtypes at once fits. None: no shape."""
    whole, layers = re.fullmatch(r"(.+?)(?:-(\d+)layers)?", name).groups() if name else ("", None)  # type: ignore[union-attr]
    if whole not in SHAPES or (layers is not None and not 0 < int(layers) <= SHAPES[whole]["num_hidden_layers"]):
        return None
    return SHAPES[whole] if layers is None else {**SHAPES[whole], "num_hidden_layers": int(layers)}


def shape_config(name: str) -> ModelConfig:
    """The shape `name` as a ModelConfig. Raises ValueError that lists the names."""
    source = shape_source(name)
    if source is None:
        raise ValueError(f"shape {name!r} is unknown; known: {', '.join(SHAPES)}, each also as its first layers (-2layers)")
    return ModelConfig.from_dict(source, source=name)
