"""ModelConfig: what a config.json says about a model's shape, in one frozen value. Not the weights, not the limits of serving.

Reading rules follow the model specification, sections 1.1 to 1.3; a field that twinfer does not know how to honour is an error, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinfer.defaults import DEFAULTS
from twinfer.errors import ConfigError, UnsupportedModel
from twinfer.experts import Experts, read_experts
from twinfer.fields import Fields
from twinfer.gdn import GatedDeltaNet, read_gdn
from twinfer.rope import RopeConfig, read_rope

SUPPORTED_MODEL_TYPES = tuple(DEFAULTS)  # by the reference engine; the fast engine refuses what it has no kernels for
DTYPES = ("float64", "float32", "bfloat16", "float16")
SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# config.json's model_type -> ours. A file of the text model alone says "_text".
_NAMES = {**{name: name for name in DEFAULTS}, "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
_MULTIMODAL = ("qwen3_5", "qwen3_5_moe")
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SPARSE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
# Fields that a file must name. transformers' classes have defaults for them, but those are the shape of no published model, and transformers writes all
# of them into every file: where one is missing the file is cut or made by hand, and a plan from it would be of a model that nobody meant.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
_DERIVED = {"qwen3_moe": ("head_dim",), "qwen3_5_moe": ("intermediate_size",)}  # what these types do without


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. Counts are `num_x`; widths and dims are in elements; `windows[i]` is layer i's sliding window in tokens or None.

    intermediate_size  width of the dense feed forward; 0 in a model type that has none
    gdn, experts       None in a model without such layers
    attention_gate     full attention's output is multiplied by the sigmoid of a gate, which the query projection gives too
    centred_norms      norms multiply by 1 + weight (not the one inside Gated DeltaNet)
    assumed            "field = value" of what the file leaves to transformers' defaults and an engine's results or memory depend on
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str
    gdn: GatedDeltaNet | None = None
    experts: Experts | None = None
    attention_gate: bool = False
    centred_norms: bool = False
    assumed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that turn with its position: the first ones."""
        return int(self.head_dim * self.rope.partial)

    @property
    def num_projected_heads(self) -> int:
        """Heads that attention's first projection gives: queries, their gates where there are any, keys and values."""
        return (2 if self.attention_gate else 1) * self.num_heads + 2 * self.num_kv_heads

    @property
    def mlp_size(self) -> int:
        """Width of the widest dense feed forward that a layer really has, a shared expert included; 0 where there is none."""
        widths = [0 if self.has_experts(layer) else self.intermediate_size for layer in range(self.num_layers)]
        shared = 0 if self.experts is None or not any(self.experts.layers) else self.experts.shared_intermediate_size or 0
        return max(shared, *widths)

    @property
    def num_gdn_layers(self) -> int:
        """Layers that keep a state for each sequence."""
        return sum(self.has_gdn(layer) for layer in range(self.num_layers))

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep keys and values in pages."""
        return self.num_layers - self.num_gdn_layers

    def has_gdn(self, layer: int) -> bool:
        """Whether a layer's token mixer is Gated DeltaNet, which keeps a state and no pages; else it is attention."""
        return self.gdn is not None and self.gdn.layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed forward is a choice among experts; else it is dense."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def num_parameters(self) -> int:
        """Parameters that an executor keeps in memory (a tied head is counted once)."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        queries = 2 * q if self.attention_gate else q
        attention = hidden * (queries + q + 2 * kv) + 2 * self.head_dim
        if self.attention_bias:
            attention += queries + 2 * kv + hidden
        total = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden + hidden
        for layer in range(self.num_layers):
            mixer = self.gdn.num_parameters(hidden) if self.gdn is not None and self.has_gdn(layer) else attention
            sparse = self.experts is not None and self.has_experts(layer)
            feed_forward = self.experts.num_parameters(hidden) if self.experts is not None and sparse else 3 * hidden * self.intermediate_size
            total += mixer + feed_forward + 2 * hidden
        return total

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads `path`, a config.json or the directory that holds one. Raises ConfigError naming the file and field.

        A file must name the model's shape, where a dict (`from_dict`) may leave it to transformers' defaults.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; a model is a directory in Hugging Face format with a config.json") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{file}: not readable as JSON ({error})") from None
        _check_shape_is_named(data, str(file))
        return cls.from_dict(data, source=str(file))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Reads a config.json's content. `source` names it in errors. Raises ConfigError; UnsupportedModel for a type that can't be read."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: the top level must be an object, it is {type(data).__name__}")
        given = data.get("model_type")
        model_type = _NAMES.get(given) if isinstance(given, str) else None
        if model_type is None:
            raise UnsupportedModel(source, given, SUPPORTED_MODEL_TYPES)
        read = _text(data, source, model_type)
        for where in (data, read.data):
            if where.get("quantization_config") is not None:
                raise ConfigError(f"{source}: quantization_config is set; quantised weights are not supported")
        hybrid = model_type in _HYBRID
        heads = read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", null=heads if model_type == "qwen3" else None)
        if heads % kv_heads:
            read.refuse("num_attention_heads", heads, f"is not a multiple of num_key_value_heads = {kv_heads}")
        hidden_size = read.count("hidden_size")
        head_dim = _head_dim(read, hidden_size, heads) if model_type == "qwen3_moe" else read.count("head_dim")
        if head_dim % 2:
            read.refuse("head_dim", head_dim, "must be even (rotary halves)")
        activation = read.data.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            read.refuse("hidden_act", activation, "is not supported; supported: silu")
        if hybrid:
            read.only("attn_output_gate", True)
            read.only("use_sliding_window", False)
        max_position = read.count("max_position_embeddings")
        num_layers = read.count("num_hidden_layers")
        tied = Fields(data, source, {}) if "tie_word_embeddings" in data else read
        return cls(
            model_type=model_type,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=0 if model_type == "qwen3_5_moe" else read.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps"),
            max_position=max_position,
            tie_word_embeddings=tied.flag("tie_word_embeddings"),
            attention_bias=read.flag("attention_bias"),
            rope=read_rope(read, model_type, head_dim, max_position, partial=hybrid, mrope=model_type in _MULTIMODAL),
            windows=(None,) * num_layers if hybrid else _windows(read, num_layers, every=model_type == "qwen3_moe"),
            dtype=_dtype(read.data, source) or _dtype(data, source) or "float32",
            gdn=read_gdn(read, num_layers, interleaved=model_type == "qwen3_next") if hybrid else None,
            experts=read_experts(read, model_type, num_layers) if model_type in _SPARSE else None,
            attention_gate=hybrid,
            centred_norms=hybrid,
            assumed=_assumed(data, read),
        )


_SIZES_OF_PARTS = ("linear_", "num_experts", "moe_", "shared_expert")  # how the fields of Gated DeltaNet and of experts begin


def _check_shape_is_named(data: Any, source: str) -> None:
    """Raises ConfigError for a file that leaves a part of the model's shape out. What is no config of a known type is refused by `from_dict`."""
    model_type = _NAMES.get(str(data.get("model_type"))) if isinstance(data, Mapping) else None
    if model_type is not None:
        named = _text(data, source, model_type).data
        missing = [name for name in _SHAPE if name not in named and name not in _DERIVED.get(model_type, ())]
        if missing:
            raise ConfigError(f"{source}: {', '.join(missing)} missing; the file must name the model's shape, as transformers writes it")


def _assumed(data: Mapping[str, Any], read: Fields) -> tuple[str, ...]:
    """What neither level of the file says, of the fields that weights, memory or results depend on and that a file may leave out."""
    rope = read.data.get("rope_scaling") or read.data.get("rope_parameters") or {}
    said = {*data, *read.data, *rope, *(["dtype"] if "torch_dtype" in {*data, *read.data} else [])}
    values = {**{name: read.defaults[name] for name in ("rms_norm_eps", "tie_word_embeddings", "attention_bias")}, "rope_theta": 10000.0, "dtype": "float32"}
    values |= {name: value for name, value in read.defaults.items() if name.startswith(_SIZES_OF_PARTS)}
    return tuple(f"{name} = {str(value).lower()}" for name, value in values.items() if name not in said)


def dtype_name(dtype: str) -> str:
    """A dtype's full name, from that or from its short one. Raises ConfigError for one that no engine has."""
    name = SHORT_DTYPES.get(dtype, dtype)
    if name not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})")
    return name


def _text(data: Mapping[str, Any], source: str, model_type: str) -> Fields:
    """The fields of the text model: those under text_config where there are such, else the top level (spec 1.1)."""
    text = data.get("text_config")
    if text is None:
        return Fields(data, source, DEFAULTS[model_type])
    if model_type not in _MULTIMODAL:
        raise ConfigError(f"{source}: text_config is set; supported for {', '.join(_MULTIMODAL)}")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{source}: text_config must be an object, it is {type(text).__name__}")
    inner = text.get("model_type", model_type)
    if not isinstance(inner, str) or _NAMES.get(inner) != model_type:
        raise ConfigError(f"{source}: text_config.model_type = {inner!r} is not supported; supported: {model_type}_text")
    return Fields(text, source, DEFAULTS[model_type], "text_config.")


def _head_dim(read: Fields, hidden_size: int, num_heads: int) -> int:
    """qwen3_moe has no default of its own: the heads share hidden_size."""
    if "head_dim" in read.data:
        return read.count("head_dim")
    if hidden_size % num_heads:
        raise ConfigError(f"{read.source}: head_dim is absent, and hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    return hidden_size // num_heads


def _dtype(data: Mapping[str, Any], source: str) -> str | None:
    value = data.get("dtype") or data.get("torch_dtype")
    name = str(value).removeprefix("torch.")
    if value and name not in DTYPES:
        raise ConfigError(f"{source}: dtype = {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return name if value else None


def _windows(read: Fields, num_layers: int, *, every: bool) -> tuple[int | None, ...]:
    """Sliding window per layer: layer_types wins; else layers from max_window_layers on slide when use_sliding_window and the window is not null.

    every  all layers slide, or none (qwen3_moe, which reads neither of the two); layer_types that say otherwise are an error
    """
    sliding = read.flag("use_sliding_window") and read.get("sliding_window") is not None
    window = read.count("sliding_window") if sliding else None
    kinds = read.data.get("layer_types")
    if kinds is None:
        first = 0 if every else read.count("max_window_layers", least=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    for i, kind in enumerate(read.each("layer_types", kinds, num_layers, ("full_attention", "sliding_attention"))):
        if kind == "sliding_attention" and window is None:
            raise ConfigError(f"{read.source}: layer_types[{i}] is sliding_attention but use_sliding_window is not true, or sliding_window is null")
        if every and kind == "full_attention" and window is not None:
            raise ConfigError(f"{read.source}: layer_types[{i}] is full_attention but use_sliding_window is true, by which every layer of qwen3_moe slides")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
