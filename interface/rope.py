"""RopeConfig: how a model turns positions into angles, as config.json says it. The formulas are `twinfer.engine.frequencies`.

M-RoPE (three position rows, of time, height and width) is read and left out: in a text all three rows are the same, and it is plain rope (model
specification, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinfer.errors import ConfigError
from twinfer.fields import Fields

_ROPE_TYPES = ("default", "yarn", "linear")
_ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
)
_MROPE_FIELDS = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear or yarn; the yarn fields are None where the file leaves them to the formula's default.

    partial  the share of a head's dims that turn: the first int(head_dim * partial), the others pass through
    """

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
    partial: float = 1.0


def read_rope(read: Fields, model_type: str, head_dim: int, max_position: int, *, partial: bool, mrope: bool) -> RopeConfig:
    """The reading rule of spec 1.3: a non-null rope_scaling replaces rope_parameters whole; theta falls back to the top level, then 10000.

    yarn's original length is the one at the top level of the file if there is one, else its own, else max_position_embeddings.

    partial  whether this model type may turn a part of a head (by default a quarter)
    mrope    whether this model type's files have the fields of M-RoPE
    """
    data, source = read.data, read.source
    params = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{source}: rope parameters must be an object, they are {params!r}")
    fields = _ROPE_FIELDS + _MROPE_FIELDS if mrope else _ROPE_FIELDS
    for field in params:
        if field not in fields:
            raise ConfigError(f"{source}: rope field {field!r} = {params[field]!r} is not supported; supported: {', '.join(fields)}")
    if mrope:
        _check_mrope(read, params)
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{source}: rope_type = {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    theta = read.positive("rope_theta", params.get("rope_theta", data.get("rope_theta", 10000.0)))
    share = params.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if not partial:
        if share not in (None, 1, 1.0):
            read.refuse("partial_rotary_factor", share, f"is not supported for {model_type}")
        share = 1.0
    share = read.positive("partial_rotary_factor", 0.25 if share is None else share)
    turned = int(head_dim * share)
    if turned < 2 or turned % 2 or turned > head_dim:
        read.refuse("partial_rotary_factor", share, f"makes {turned} dims of head_dim = {head_dim} turn; must be even, from 2 to {head_dim}")
    if kind == "default":
        return RopeConfig(theta, partial=share)
    factor = read.positive("rope factor", params.get("factor"))
    if kind == "linear":
        return RopeConfig(theta, "linear", factor, partial=share)
    if theta <= 1:
        raise ConfigError(f"{source}: rope_theta = {theta} must be above 1 for yarn, whose formula divides by its logarithm")
    return _yarn(read, params, theta, factor, max_position, share)


def _yarn(read: Fields, params: Mapping[str, Any], theta: float, factor: float, max_position: int, partial: float) -> RopeConfig:
    def optional(field: str) -> float | None:
        value = params.get(field)
        return None if value is None else read.positive(f"rope {field}", value)

    field = "original_max_position_embeddings"
    original = read.data.get(field, params.get(field, max_position))
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        read.refuse(f"rope {field}", original, "must be an integer of at least 1")
    truncate = params.get("truncate", True)
    if not isinstance(truncate, bool):
        read.refuse("rope truncate", truncate, "must be true or false")
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
        partial=partial,
    )


def _check_mrope(read: Fields, params: Mapping[str, Any]) -> None:
    section = params.get("mrope_section")
    plain = isinstance(section, list) and len(section) == 3 and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in section)
    if section is not None and not plain:
        read.refuse("rope mrope_section", section, "must list three integers of at least 0")
    interleaved = params.get("mrope_interleaved")
    if interleaved is not None and not isinstance(interleaved, bool):
        read.refuse("rope mrope_interleaved", interleaved, "must be true or false")
