"""Tiny models of the five types, made by transformers with every parameter random, and transformers' logits of them. None of our formulas are here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

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
