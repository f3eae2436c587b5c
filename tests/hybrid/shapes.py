"""Tiny shapes of the five model types, and transformers' classes for them. No formula and no expected value lives here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


@dataclass(frozen=True)
class Kind:
    """transformers' classes of one model type; `wrapper` and `wrapper_model` are those of the model with a vision tower."""

    config: type[PreTrainedConfig]
    model: Any
    shape: dict[str, Any]
    wrapper: type[PreTrainedConfig] | None = None
    wrapper_model: Any = None


COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # 4 * 32 != 64
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
DENSE: dict[str, Any] = {"intermediate_size": 80}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
# Three value heads a key head, and value heads as wide as no other dim.
GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    # Two of four layers are attention: with one of them a fault there would change too little (model specification, 7.38).
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
PLAIN_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
PARTIAL_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
MROPE: dict[str, Any] = {"rope_parameters": {**PARTIAL_ROPE["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}}

# By our name of the type.
KINDS: dict[str, Kind] = {
    "qwen3": Kind(Qwen3Config, Qwen3ForCausalLM, {**COMMON, **DENSE, **PLAIN_ROPE}),
    "qwen3_moe": Kind(Qwen3MoeConfig, Qwen3MoeForCausalLM, {**COMMON, **DENSE, **EXPERTS, **PLAIN_ROPE}),
    "qwen3_next": Kind(Qwen3NextConfig, Qwen3NextForCausalLM, {**COMMON, **DENSE, **EXPERTS, **SHARED, **GDN, **PARTIAL_ROPE}),
    "qwen3_5": Kind(Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**COMMON, **DENSE, **GDN, **MROPE}, Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": Kind(
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {**COMMON, **{name: value for name, value in EXPERTS.items() if name != "norm_topk_prob"}, **SHARED, **GDN, **MROPE},
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    ),
}
NEW = tuple(name for name in KINDS if name != "qwen3")
HYBRID = tuple(name for name in NEW if name != "qwen3_moe")
WRAPPED = tuple(name for name, kind in KINDS.items() if kind.wrapper is not None)
SPARSE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 2,
}
