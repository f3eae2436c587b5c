"""Weights as the fast engine multiplies them: projections that share an input are one matrix. No arithmetic; a weight's bits are the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
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


class Joined:
    """The joined matrices of every layer, uninitialised, and `parts`: by checkpoint name, the rows of them that are that tensor.

    A loader writes into the parts, so that a weight exists once: joining tensors that were loaded apart takes both for a moment, and the caching
    allocator keeps the holes that the parts leave (2.4 GiB of an 8B model's 15.6, one H200).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        heads, kv_heads, dim, hidden, inner = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size, config.intermediate_size
        rows = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.parts: dict[str, torch.Tensor] = {}

        def joined(names: list[str], sizes: list[int], *rest: int) -> torch.Tensor:
            whole = torch.empty(sum(sizes), *rest, dtype=dtype, device=device)
            self.parts |= dict(zip(names, torch.split(whole, sizes), strict=True))
            return whole

        self.qkv, self.qkv_bias, self.gate_up = [], [], []
        for i in range(config.num_layers):
            attention, mlp = _prefixes(i)
            names = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
            self.qkv.append(joined([name + ".weight" for name in names], rows, hidden))
            self.qkv_bias.append(joined([name + ".bias" for name in names], rows) if config.attention_bias else None)
            self.gate_up.append(joined([mlp + name + ".weight" for name in ("gate_proj", "up_proj")], [inner, inner], hidden))

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies the parts of `weights` that are not here already."""
        for name, part in self.parts.items():
            if weights[name].data_ptr() != part.data_ptr():
                part.copy_(weights[name])


def fused(config: ModelConfig, weights: Mapping[str, torch.Tensor], joined: Joined) -> Weights:
    """`weights` by checkpoint name, as the engine multiplies them; `joined` holds their parts, filled."""
    layers = []
    for i in range(config.num_layers):
        attention, mlp = _prefixes(i)
        layers.append(
            LayerWeights(
                input_norm=weights[f"model.layers.{i}.input_layernorm.weight"],
                qkv=joined.qkv[i],
                qkv_bias=joined.qkv_bias[i],
                q_norm=weights[attention + "q_norm.weight"],
                k_norm=weights[attention + "k_norm.weight"],
                o=weights[attention + "o_proj.weight"],
                o_bias=weights.get(attention + "o_proj.bias"),
                post_norm=weights[f"model.layers.{i}.post_attention_layernorm.weight"],
                gate_up=joined.gate_up[i],
                down=weights[mlp + "down_proj.weight"],
            )
        )
    return Weights(weights[EMBEDDING], weights[HEAD], weights["model.norm.weight"], tuple(layers))


def _prefixes(layer: int) -> tuple[str, str]:
    return f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
