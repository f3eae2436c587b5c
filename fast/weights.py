"""Weights as the fast engine multiplies them: projections that share an input are one matrix. No arithmetic; a weight's bits are the checkpoint's."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import EMBEDDING, HEAD


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. h hidden_size, H and K query and kv heads, d head_dim, I intermediate_size.

    input_norm, post_norm [h]; qkv [(H + 2 K) d, h]; q_norm, k_norm [d]; o [h, H d]; gate_up [2 I, h]; down [h, I]; biases as the rows, or None
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """embedding and head [V, h] (one tensor where tied), norm [h], layers."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]


def fused(config: ModelConfig, weights: MutableMapping[str, torch.Tensor]) -> Weights:
    """Takes the tensors out of `weights` (by checkpoint name), so that a layer's parts are freed as soon as they are joined."""
    layers = []
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        has_bias = qkv[0] + ".bias" in weights
        layers.append(
            LayerWeights(
                input_norm=weights.pop(f"model.layers.{i}.input_layernorm.weight"),
                qkv=torch.cat([weights.pop(name + ".weight") for name in qkv]),
                qkv_bias=torch.cat([weights.pop(name + ".bias") for name in qkv]) if has_bias else None,
                q_norm=weights.pop(attention + "q_norm.weight"),
                k_norm=weights.pop(attention + "k_norm.weight"),
                o=weights.pop(attention + "o_proj.weight"),
                o_bias=weights.pop(attention + "o_proj.bias", None),
                post_norm=weights.pop(f"model.layers.{i}.post_attention_layernorm.weight"),
                gate_up=torch.cat([weights.pop(mlp + name + ".weight") for name in ("gate_proj", "up_proj")]),
                down=weights.pop(mlp + "down_proj.weight"),
            )
        )
    return Weights(weights.pop(EMBEDDING), weights.pop(HEAD), weights.pop("model.norm.weight"), tuple(layers))
