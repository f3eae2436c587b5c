"""Shapes of real models as config.json contents, to be run with random weights. No weights and no checkpoint reading here.

Source: the published configurations (model specification, section 5); tests/bench/test_workloads.py checks them against the published parameter counts.
Of the multimodal ones it is the text model: its config.json as it is stored by itself.
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


def _moe(hidden: int, layers: int, heads: int, kv_heads: int, experts: int, width: int) -> dict[str, Any]:
    """qwen3_moe: as the dense ones, with experts in every layer."""
    return {
        **_dense(hidden, 3 * hidden, layers, heads, False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": kv_heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _hybrid(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, tied: bool, **feed_forward: int) -> dict[str, Any]:
    """qwen3_5, or qwen3_5_moe where `feed_forward` names experts: three layers of Gated DeltaNet to one of attention."""
    sparse = "num_experts" in feed_forward
    return {
        "architectures": ["Qwen3_5MoeForCausalLM" if sparse else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if sparse else "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "eos_token_id": 248044,
        "dtype": "bfloat16",
        **feed_forward,
    }


_A3B = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense(1024, 3072, 28, 16, True),
    "qwen3-4b": _dense(2560, 9728, 36, 32, True),
    "qwen3-8b": _dense(4096, 12288, 36, 32, False),
    "qwen3-32b": _dense(5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": _moe(2048, 48, 32, 4, 128, 768),
    "qwen3.5-4b": _hybrid(2560, 32, 16, 4, 32, True, intermediate_size=9216),
    "qwen3.6-27b": _hybrid(5120, 64, 24, 4, 48, False, intermediate_size=17408),
    "qwen3.6-35b-a3b": _hybrid(2048, 40, 16, 2, 32, False, **_A3B),
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
