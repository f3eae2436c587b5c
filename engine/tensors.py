"""Names and shapes of a model's tensors, from its config alone: in the form that engines compute with, and as files store them. No tensor is touched.

The two forms differ where published files do (model specification, section 2). Engines get one: the prefix "model.", the experts of a layer stacked
in two tensors, and the input projections of Gated DeltaNet as four matrices. `twinfer.engine.layout` turns one into the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twinfer.config import ModelConfig
from twinfer.experts import Experts
from twinfer.gdn import GatedDeltaNet

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PREFIX = "model."
MULTIMODAL_PREFIX = "model.language_model."
_MULTIMODAL = ("qwen3_5", "qwen3_5_moe")
# Kept in float32 by some files of 16-bit models, and then by us: the decay is exp(A_log) (model specification, 2.6).
KEPT_WIDE = (".linear_attn.A_log", ".linear_attn.norm.weight")


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a file stores what published files store in more than one way.

    prefix  of the text model's names: PREFIX, or MULTIMODAL_PREFIX where it was written as part of a model with a vision tower
    fused   the experts of a layer lie in two tensors, as for engines; else in three an expert
    """

    prefix: str = PREFIX
    fused: bool = False

    @classmethod
    def of(cls, config: ModelConfig, names: Iterable[str]) -> StoredForm:
        """The form of a file whose text model has tensors of these names. Files decide: a config.json of either kind comes with either prefix."""
        names = list(names)
        nested = config.model_type in _MULTIMODAL and any(name.startswith(MULTIMODAL_PREFIX) for name in names)
        return cls(MULTIMODAL_PREFIX if nested else PREFIX, any(name.endswith(".mlp.experts.gate_up_proj") for name in names))

    def stored_name(self, name: str) -> str:
        """The file's name of a tensor."""
        return self.prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name


def expected_tensors(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that an engine gets; the head only where it is not tied. Matrices are [out, in]."""
    return _tensors(config, interleaved=False, fused=True)


def stored_tensors(config: ModelConfig, form: StoredForm) -> Shapes:
    """The same as a file names and stores them."""
    interleaved = config.gdn is not None and config.gdn.interleaved
    return {form.stored_name(name): shape for name, shape in _tensors(config, interleaved=interleaved, fused=form.fused).items()}


def engine_name(name: str) -> str:
    """An engine's name of a tensor in a file of either prefix."""
    return PREFIX + name.removeprefix(MULTIMODAL_PREFIX) if name.startswith(MULTIMODAL_PREFIX) else name


def known_and_unused(config: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Those names in a file that are none of the text model's but of what published files of its type hold beside it. None of these is read.

    They are the vision tower's, whatever they are, and the draft module's (model specification, 2.5). Another name under "mtp." is unknown.
    """
    draft = frozenset() if config.gdn is None else frozenset(_draft_names(config))
    visual = config.model_type in _MULTIMODAL
    return tuple(name for name in names if (visual and name.startswith("model.visual.")) or _DRAFT_LAYER.sub(_DRAFT_LAYERS, name) in draft)


_DRAFT_LAYER, _DRAFT_LAYERS = re.compile(r"^mtp\.layers\.\d+\."), "mtp.layers.*."


def _draft_names(config: ModelConfig) -> Iterator[str]:
    """A layer has the names of a layer of the trunk with attention, experts in either form. Re-exports give the module an embedding or a head too."""
    for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "embed_tokens", "lm_head"):
        yield f"mtp.{name}.weight"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{_DRAFT_LAYERS}{name}.weight"
    yield from _attention(config, _DRAFT_LAYERS + "self_attn.")
    if config.experts is None:
        yield from _dense(config.intermediate_size, config.hidden_size, _DRAFT_LAYERS + "mlp.")
    else:
        for fused in (True, False):
            yield from _experts(config.experts, config.hidden_size, _DRAFT_LAYERS + "mlp.", fused=fused)


def _tensors(config: ModelConfig, *, interleaved: bool, fused: bool) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"{PREFIX}layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        if config.gdn is not None and config.has_gdn(i):
            shapes |= _gdn(config.gdn, hidden, layer + "linear_attn.", interleaved=interleaved)
        else:
            shapes |= _attention(config, layer + "self_attn.")
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if config.experts is not None and config.has_experts(i):
            shapes |= _experts(config.experts, hidden, layer + "mlp.", fused=fused)
        else:
            shapes |= _dense(config.intermediate_size, hidden, layer + "mlp.")
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def _attention(config: ModelConfig, at: str) -> Shapes:
    """Attention. With an output gate, a head's rows of q_proj are head_dim of the query, then head_dim of the gate."""
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    for name, out, width in (("q_proj", 2 * q if config.attention_gate else q, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, q)):
        shapes[f"{at}{name}.weight"] = (out, width)
        if config.attention_bias:
            shapes[f"{at}{name}.bias"] = (out,)
    return {**shapes, at + "q_norm.weight": (config.head_dim,), at + "k_norm.weight": (config.head_dim,)}


def _gdn(gdn: GatedDeltaNet, hidden: int, at: str, *, interleaved: bool) -> Shapes:
    """Gated DeltaNet. The channels of conv1d and of in_proj_qkv are all queries, all keys, all values."""
    heads = gdn.num_value_heads
    if interleaved:
        projections = {"in_proj_qkvz": gdn.conv_dim + gdn.value_dim, "in_proj_ba": 2 * heads}
    else:
        projections = {"in_proj_qkv": gdn.conv_dim, "in_proj_z": gdn.value_dim, "in_proj_b": heads, "in_proj_a": heads}
    return {
        at + "dt_bias": (heads,),
        at + "A_log": (heads,),
        at + "conv1d.weight": (gdn.conv_dim, 1, gdn.conv_kernel),
        **{f"{at}{name}.weight": (out, hidden) for name, out in projections.items()},
        at + "norm.weight": (gdn.value_head_dim,),
        at + "out_proj.weight": (hidden, gdn.value_dim),
    }


def _dense(width: int, hidden: int, at: str) -> Shapes:
    return {at + "gate_proj.weight": (width, hidden), at + "up_proj.weight": (width, hidden), at + "down_proj.weight": (hidden, width)}


def _experts(experts: Experts, hidden: int, at: str, *, fused: bool) -> Shapes:
    """Router, experts and shared expert. Fused experts have no ".weight"; rows of gate_up_proj are the gate's, then the up projection's."""
    num, width = experts.num_experts, experts.intermediate_size
    shapes: Shapes = {at + "gate.weight": (num, hidden)}
    if fused:
        shapes |= {at + "experts.gate_up_proj": (num, 2 * width, hidden), at + "experts.down_proj": (num, hidden, width)}
    else:
        for e in range(num):
            shapes |= _dense(width, hidden, f"{at}experts.{e}.")
    if experts.shared_intermediate_size is not None:
        shapes |= _dense(experts.shared_intermediate_size, hidden, at + "shared_expert.")
        shapes[at + "shared_expert_gate.weight"] = (1, hidden)
    return shapes
