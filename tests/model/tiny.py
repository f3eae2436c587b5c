"""Tiny Qwen3 checkpoints written by transformers, every parameter random, and transformers' logits of them. None of our formulas are used here."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from twinfer.golden.widened import widened_module

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # 4 * 32 != 64
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "one_query_head_per_kv_head": {"num_key_value_heads": 4},
    "window_from_layer_1": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "window_by_layer_types": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "window_null": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    "yarn": {"rope_parameters": YARN},
    "yarn_all_fields": {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    "yarn_attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.25}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
}


def write_checkpoint(path: Path, shape: dict[str, Any], max_shard_size: str | None = None) -> Path:
    """A checkpoint in `path` with SHAPE and what `shape` changes in it. Norms, biases and matrices are random; the embedding is as small as trained
    ones are, so that epsilon matters.
    """
    config = Qwen3Config(**{**SHAPE, **shape})
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(1.5 + 0.3 * noise)
            elif name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
                parameter.copy_(0.02 * noise)
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return path


def edit_config(path: Path, change: dict[str, Any], drop: Sequence[str] = ()) -> None:
    """Rewrites fields of the checkpoint's config.json."""
    file = path / "config.json"
    data = {key: value for key, value in json.loads(file.read_text()).items() if key not in drop}
    file.write_text(json.dumps({**data, **change}))


def load_hf(path: Path, dtype: str) -> Any:
    """transformers' model, eager attention; in float64 the one whose internal float32 casts are widened."""
    if dtype != "float64":
        return Qwen3ForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="eager").eval()
    model = widened_module().Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    rotary = model.model.rotary_emb
    if rotary.rope_type != "default":  # computed in a module of its own, which has casts of its own
        rotary.inv_freq, rotary.attention_scaling = _widened_rope().ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config)
    assert rotary.inv_freq.dtype == torch.float64
    return model


def _widened_rope() -> ModuleType:
    spec = importlib.util.find_spec("transformers.modeling_rope_utils")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for narrow, wide in (("torch.float32", "torch.float64"), ("dtype=torch.float)", "dtype=torch.float64)")):
        assert narrow in source
        source = source.replace(narrow, wide)
    module = ModuleType("transformers.modeling_rope_utils_float64")
    module.__package__, module.__file__ = "transformers", spec.origin
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def hf_logits(model: Any, tokens: Sequence[int], prompt: int) -> torch.Tensor:
    """[len(tokens), vocab_size]: the first `prompt` tokens in one call, then one token a call through transformers' cache."""
    cache = DynamicCache(config=model.config)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        logits = [model(input_ids=ids[:, :prompt], use_cache=True, **{argument: cache}).logits[0]]
        for i in range(prompt, len(tokens)):
            logits.append(model(input_ids=ids[:, i : i + 1], use_cache=True, **{argument: cache}).logits[0])
    return torch.cat(logits)


def nats(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of log-probabilities, NaN if either holds one. Both [n, vocab_size]."""
    assert a.shape == b.shape
    assert len(a) > 0
    return float((a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs().max())
