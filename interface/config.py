"""ModelConfig: what a config.json says about a model's shape, in one frozen value. Not the weights, not the limits of serving.

Reading rules follow the model specification, sections 1.2 and 1.3; a field that twinfer does not know how to honour is an error, never ignored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinfer.errors import ConfigError, UnsupportedModel

SUPPORTED_MODEL_TYPES = ("qwen3",)
DTYPES = ("float64", "float32", "bfloat16", "float16")
_ROPE_TYPES = ("default", "yarn", "linear")
_ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear or yarn; the yarn fields are None where the file leaves them to the formula's default."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. Counts are `num_x`; widths and dims are in elements; `windows[i]` is layer i's sliding window in tokens or None."""

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

    @property
    def num_parameters(self) -> int:
        """Parameters that an executor keeps in memory (a tied head is counted once)."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + 2 * self.head_dim
        if self.attention_bias:
            attention += q + 2 * kv + self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads `path`, a config.json or the directory that holds one. Raises ConfigError naming the file and field."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; a model is a directory in Hugging Face format with a config.json") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{file}: not readable as JSON ({error})") from None
        return cls.from_dict(data, source=str(file))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Reads a config.json's content. `source` names it in errors."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: the top level must be an object, it is {type(data).__name__}")
        model_type = data.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModel(source, model_type, SUPPORTED_MODEL_TYPES)
        if data.get("quantization_config") is not None:
            raise ConfigError(f"{source}: quantization_config is set; quantised weights are not supported")
        read = _Reader(data, source)
        heads = read.count("num_attention_heads", 32)
        kv_heads = read.count("num_key_value_heads", 32, null=heads)
        if heads % kv_heads:
            raise ConfigError(f"{source}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
        head_dim = read.count("head_dim", 128)
        if head_dim % 2:
            raise ConfigError(f"{source}: head_dim = {head_dim} must be even (rotary halves)")
        activation = data.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(f"{source}: hidden_act = {activation!r} is not supported; supported: silu")
        max_position = read.count("max_position_embeddings", 32768)
        num_layers = read.count("num_hidden_layers", 32)
        return cls(
            model_type=str(model_type),
            vocab_size=read.count("vocab_size", 151936),
            hidden_size=read.count("hidden_size", 4096),
            intermediate_size=read.count("intermediate_size", 22016),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            max_position=max_position,
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            attention_bias=read.flag("attention_bias", False),
            rope=_rope(data, source, max_position),
            windows=_windows(read, num_layers),
            dtype=_dtype(data, source),
        )


class _Reader:
    """Typed access to a config's fields with errors that name file, field and value."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def count(self, field: str, default: int, null: int | None = None) -> int:
        """An integer of at least 1; `default` where the field is absent, `null` where it is null (an error if None)."""
        value = self.data.get(field, default)
        if value is None and null is not None:
            return null
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {field} = {value!r} must be an integer of at least 1")
        return value

    def number(self, field: str, default: float) -> float:
        return _positive(self.data.get(field, default), field, self.source)

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {field} = {value!r} must be true or false")
        return value


def _positive(value: object, field: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{source}: {field} = {value!r} must be a positive number")
    return float(value)


def _dtype(data: Mapping[str, Any], source: str) -> str:
    value = data.get("dtype") or data.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{source}: dtype = {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _windows(read: _Reader, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer: layer_types wins; else layers from max_window_layers on slide when use_sliding_window and the window is not null."""
    data, source = read.data, read.source
    sliding = read.flag("use_sliding_window", False) and data.get("sliding_window", 4096) is not None
    window = read.count("sliding_window", 4096) if sliding else None
    kinds = data.get("layer_types")
    if kinds is None:
        first = data.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f"{source}: max_window_layers = {first!r} must be an integer of at least 0")
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"{source}: layer_types must list {num_layers} layers")
    for i, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{source}: layer_types[{i}] = {kind!r} is not supported; supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise ConfigError(f"{source}: layer_types[{i}] is sliding_attention but use_sliding_window is not true, or sliding_window is null")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(data: Mapping[str, Any], source: str, max_position: int) -> RopeConfig:
    """The reading rule of spec 1.3: a non-null rope_scaling replaces rope_parameters whole; theta falls back to the top level, then 10000.

    yarn's original length is the one at the top level of the file if there is one, else its own, else max_position_embeddings.
    """
    params = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{source}: rope parameters must be an object, they are {params!r}")
    for field in params:
        if field not in _ROPE_FIELDS:
            raise ConfigError(f"{source}: rope field {field!r} = {params[field]!r} is not supported; supported: {', '.join(_ROPE_FIELDS)}")
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{source}: rope_type = {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    theta = params.get("rope_theta", data.get("rope_theta", 10000.0))
    theta = _positive(theta, "rope_theta", source)
    partial = params.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"{source}: partial_rotary_factor = {partial!r} is not supported for qwen3")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _positive(params.get("factor"), "rope factor", source)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)

    if theta <= 1:
        raise ConfigError(f"{source}: rope_theta = {theta} must be above 1 for yarn, whose formula divides by its logarithm")

    def optional(field: str) -> float | None:
        value = params.get(field)
        return None if value is None else _positive(value, f"rope {field}", source)

    original = data.get("original_max_position_embeddings", params.get("original_max_position_embeddings", max_position))
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise ConfigError(f"{source}: rope original_max_position_embeddings = {original!r} must be an integer of at least 1")
    truncate = params.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{source}: rope truncate = {truncate!r} must be true or false")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=optional("attention_factor"),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=truncate,
    )
