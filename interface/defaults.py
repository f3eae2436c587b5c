"""Defaults: what an absent field of config.json stands for, by model type. The numbers are those of transformers' configuration classes.

A field that is in no table here has no default that a file may rely on, or none that matters.
"""

from __future__ import annotations

from typing import Any

_ALL: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_SLIDING: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1}
_HYBRID: dict[str, Any] = {
    **_ALL,
    "head_dim": 256,
    "num_attention_heads": 16,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **_ALL,
        **_SLIDING,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        **_ALL,
        **_SLIDING,
        **_SPARSE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "qwen3_next": {
        **_HYBRID,
        **_SPARSE,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5": {
        **_HYBRID,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe": {
        **_HYBRID,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
