"""Tiny models of the five types, made by transformers with every parameter random, and transformers' logits of them. None of our formulas are here."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import _widened_rope
from twinfer.golden.widened import widened_module

from .shapes import KINDS, VISION


def make(name: str, change: dict[str, Any] | None = None, *, wrapper: bool = False, seed: int = 7) -> Any:
    """A float32 model on the CPU, eager everywhere; `wrapper`: the text model inside a multimodal one."""
    kind = KINDS[name]
    shape = copy.deepcopy({**kind.shape, **(change or {})})
    if wrapper:
        assert kind.wrapper is not None
        tied = shape["tie_word_embeddings"]
        model = kind.wrapper_model(kind.wrapper(text_config=shape, vision_config=VISION, tie_word_embeddings=tied))
    else:
        model = kind.model(kind.config(**shape))
    randomise(model, seed)
    return model.eval()


def randomise(model: Any, seed: int) -> None:
    """Every parameter: fresh models have norms of 0 or 1 and a dt_bias of 1, with which wrong formulas pass (model specification, 7.37)."""
    generator = torch.Generator().manual_seed(seed)
    centred = any(type(module).__name__.endswith("RMSNormGated") for module in model.modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                one_plus = centred and not name.endswith("linear_attn.norm.weight")
                inner = 0.5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
                parameter.copy_((0.0 if one_plus else 1.0) + inner + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(-1.5 + noise)
            elif name.endswith("dt_bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith((".bias", "embed_tokens.weight", "lm_head.weight")):
                parameter.copy_(0.3 * noise)
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(2 * noise * parameter.shape[-1] ** -0.5)  # a router that is sure of itself
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def write(path: Path, name: str, change: dict[str, Any] | None = None, *, wrapper: bool = False, dtype: str = "float32", shard: str = "5GB") -> Path:
    """The same as a checkpoint in `path`."""
    make(name, change, wrapper=wrapper).to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard)
    return path


def modeling(name: str, dtype: str) -> Any:
    """transformers' modelling module of a type; in float64 the one whose internal float32 casts are widened."""
    return widened_module(name) if dtype == "float64" else import_module(KINDS[name].model.__module__)


def load_hf(path: Path, name: str, dtype: str, *, wrapper: bool = False) -> Any:
    """transformers' model from a checkpoint, eager attention and experts. A wrapper takes its text model from elsewhere, so it can't be widened."""
    assert not (wrapper and dtype == "float64")
    found = KINDS[name].wrapper_model if wrapper else KINDS[name].model
    model = getattr(modeling(name, dtype), found.__name__).from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    if dtype == "float64":
        rotary = model.model.rotary_emb
        if rotary.rope_type != "default":  # computed in a module of its own, which has casts of its own
            rotary.inv_freq, rotary.attention_scaling = _widened_rope().ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config)
        assert rotary.inv_freq.dtype == torch.float64
    return model.eval()


def by_our_rules(patch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """Lets transformers compute many tokens of Gated DeltaNet as it computes one, by its own function for that, and choose the lower of experts that tie.

    Both are its free choice: chunks give the same numbers but for the last bits, and what `torch.topk` does with ties is not specified.
    """
    module = modeling(name, dtype)
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        patch.setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)

    def topk(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        ordered = torch.sort(x, dim=dim, descending=True, stable=True)
        return ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k)

    patch.setattr(torch, "topk", topk)
