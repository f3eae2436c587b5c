"""Weights as the fast engine multiplies them: projections that share an input are one matrix. No arithmetic; a weight's bits are the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import EMBEDDING, HEAD

ROUTER_ROWS = 16  # the router's rows are padded to a multiple of it, so that each token's logits begin on 16 bytes


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """A layer of attention. h hidden_size, H and K query and kv heads, d head_dim, Q = H, or 2 H where each query has a gate behind it.

    place    which layer of the cache is this layer's
    qkv [(Q + 2 K) d, h]; q_norm, k_norm [d]; o [h, H d]; biases as the rows, or None
    """

    place: int
    window: int | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class GdnWeights:
    """A layer of Gated DeltaNet. C channels of the convolution (queries, keys, values), nv value heads of dv.

    place       which layer of the states is this layer's
    projection  [C + nv dv + 2 nv, h]: channels, then the output's gate z, then b, then a
    conv [C, taps]; a_log, dt_bias [nv]; norm [dv]; out [h, nv dv]. a_log and norm may be float32 in a 16-bit model
    """

    place: int
    projection: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """A dense feed forward of width I: gate_up [2 I, h], the gate's rows first; down [h, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsWeights:
    """A choice among E experts of width m.

    router   [E, h], padded with rows of zeros to a multiple of ROUTER_ROWS; row E is the shared expert's gate where there is one
    gate_up [E, 2 m, h], the gate's rows first; down [E, h, m]; shared: the expert that every token goes through
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: its two norms [h], what mixes tokens, and what works on each alone."""

    input_norm: torch.Tensor
    mixer: AttentionWeights | GdnWeights
    post_norm: torch.Tensor
    feed_forward: MlpWeights | ExpertsWeights


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """embedding and head [V, h] (one tensor where tied), norm [h], layers."""

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: tuple[LayerWeights, ...]

    def multiplied(self) -> list[torch.Tensor]:
        """Every matrix [N, K] that activations are multiplied with one by one: all but the experts'."""
        return [weight for layer in self.layers for weight in _matrices(layer)] + [self.head]


def _matrices(part: object) -> Iterator[torch.Tensor]:
    names = {"qkv", "o", "projection", "out", "gate_up", "down", "router"}
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            if field.name in names and value.dim() == 2:
                yield value
        elif isinstance(value, AttentionWeights | GdnWeights | MlpWeights | ExpertsWeights):
            yield from _matrices(value)


class Joined:
    """The joined matrices of every layer, uninitialised, and `parts`: by checkpoint name, the rows of them that are that tensor.

    A loader writes into the parts, so that a weight exists once: joining tensors that were loaded apart takes both for a moment, and the caching
    allocator keeps the holes that the parts leave (2.4 GiB of an 8B model's 15.6, one H200).
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype, self._device = dtype, device
        self.parts: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}  # by layer and field of the weights' classes, such as "0.qkv"
        hidden, dim = config.hidden_size, config.head_dim
        queries = config.num_heads * dim * (2 if config.attention_gate else 1)
        for i in range(config.num_layers):
            mlp = _mlp(i)
            if config.gdn is not None and config.has_gdn(i):
                gdn, heads = config.gdn, config.gdn.num_value_heads
                sizes = {"qkv": gdn.conv_dim, "z": gdn.value_dim, "b": heads, "a": heads}
                self._join(f"{i}.projection", {f"{_gdn(i)}in_proj_{name}.weight": rows for name, rows in sizes.items()}, hidden)
            else:
                sizes = {"q": queries, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
                self._join(f"{i}.qkv", {f"{_attention(i)}{name}_proj.weight": rows for name, rows in sizes.items()}, hidden)
                if config.attention_bias:
                    self._join(f"{i}.qkv_bias", {f"{_attention(i)}{name}_proj.bias": rows for name, rows in sizes.items()})
            if config.experts is not None and config.has_experts(i):
                shared = config.experts.shared_intermediate_size
                rows = {mlp + "gate.weight": config.experts.num_experts} | ({} if shared is None else {mlp + "shared_expert_gate.weight": 1})
                self._join(f"{i}.router", rows, hidden, multiple=ROUTER_ROWS)
                if shared is not None:
                    self._join(f"{i}.gate_up", {f"{mlp}shared_expert.{name}_proj.weight": shared for name in ("gate", "up")}, hidden)
            else:
                self._join(f"{i}.gate_up", {f"{mlp}{name}_proj.weight": config.intermediate_size for name in ("gate", "up")}, hidden)

    def _join(self, name: str, rows: Mapping[str, int], *rest: int, multiple: int = 1) -> None:
        num_rows = sum(rows.values())
        padding = -num_rows % multiple
        whole = self.whole[name] = torch.empty(num_rows + padding, *rest, dtype=self._dtype, device=self._device)
        whole[num_rows:] = 0
        self.parts |= dict(zip(rows, torch.split(whole[:num_rows], list(rows.values())), strict=True))

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies the parts of `weights` that are not here already."""
        for name, part in self.parts.items():
            if weights[name].data_ptr() != part.data_ptr():
                part.copy_(weights[name])


def fused(config: ModelConfig, weights: Mapping[str, torch.Tensor], joined: Joined) -> Weights:
    """`weights` by checkpoint name, as the engine multiplies them; `joined` holds their parts, filled."""
    layers: list[LayerWeights] = []
    num_gdn = 0
    for i in range(config.num_layers):
        at, whole = f"model.layers.{i}.", joined.whole
        mixer: AttentionWeights | GdnWeights
        feed_forward: MlpWeights | ExpertsWeights
        if config.has_gdn(i):
            own = {name: weights[_gdn(i) + tensor] for name, tensor in _GDN.items()}
            own["conv"] = own["conv"].squeeze(1)
            mixer = GdnWeights(place=num_gdn, projection=whole[f"{i}.projection"], **own)
            num_gdn += 1
        else:
            own = {name: weights[_attention(i) + tensor] for name, tensor in _ATTENTION.items()}
            bias, o_bias = whole.get(f"{i}.qkv_bias"), weights.get(_attention(i) + "o_proj.bias")
            mixer = AttentionWeights(place=i - num_gdn, window=config.windows[i], qkv=whole[f"{i}.qkv"], qkv_bias=bias, o_bias=o_bias, **own)
        if config.experts is not None and config.has_experts(i):
            has_shared = config.experts.shared_intermediate_size is not None
            shared = MlpWeights(whole[f"{i}.gate_up"], weights[_mlp(i) + "shared_expert.down_proj.weight"]) if has_shared else None
            gate_up, down = (weights[f"{_mlp(i)}experts.{name}_proj"] for name in ("gate_up", "down"))
            feed_forward = ExpertsWeights(whole[f"{i}.router"], gate_up, down, shared)
        else:
            feed_forward = MlpWeights(whole[f"{i}.gate_up"], weights[_mlp(i) + "down_proj.weight"])
        layers.append(LayerWeights(weights[at + "input_layernorm.weight"], mixer, weights[at + "post_attention_layernorm.weight"], feed_forward))
    return Weights(weights[EMBEDDING], weights[HEAD], weights["model.norm.weight"], tuple(layers))


_ATTENTION = {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight", "o": "o_proj.weight"}
_GDN = {"conv": "conv1d.weight", "a_log": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight", "out": "out_proj.weight"}


def _attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def _gdn(layer: int) -> str:
    return f"model.layers.{layer}.linear_attn."


def _mlp(layer: int) -> str:
    return f"model.layers.{layer}.mlp."
