"""resolve_limits: finds every limit by one chain and says where each came from. It reads the environment; it does not size buffers.

The chain: explicit argument -> environment (TWINFER_MAX_BATCH and so on) -> the model's own limit -> memory -> default. Two sources that
contradict each other are an error, or lower what the scheduler may do; they never change a buffer alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from twinfer.config import ModelConfig
from twinfer.errors import LimitError
from twinfer.invariants.memory import fit_pages, fit_snapshots, most_snapshots, page_bytes, plan_memory, snapshot_bytes, spare_snapshots
from twinfer.invariants.size import parse_bytes
from twinfer.limits import STATE_CHUNK, Limits, ceil_div, default_buckets

PREFIX = "TWINFER_"
MEMORY = "TWINFER_MEMORY"
AUDIT = "TWINFER_AUDIT"
OTHER_VARIABLES = (AUDIT, MEMORY)



@dataclass(frozen=True, slots=True)
class Defaults:
    """What an engine's limits are when nothing else says so. The reference: for a machine of a few cores without a GPU; a server gives its own."""

    max_batch: int = 64
    max_step_tokens: int = 2048
    max_chunk_tokens: int = 512  # the reference keeps a chunk's scores whole: at 2048 they are 37 GB for Qwen3-8B and its context, at 512 a quarter
    warmup_tokens: int = 512
    max_logit_tokens: int = 64  # the reference sampler takes 0.6 GB for 64 rows of Qwen3's 151936 logits (see memory.SAMPLER_BYTES)
    page_size: int = 16
    look_ahead: int = 0


DEFAULTS: Mapping[str, Defaults] = {
    "reference": Defaults(),
    # Pages of 64 are attention's tile of keys, so that its address arithmetic is least; a step is planned while another runs.
    "fast": Defaults(max_batch=256, max_step_tokens=8192, max_chunk_tokens=8192, max_logit_tokens=256, page_size=64, look_ahead=1),
}
DEFAULT_POOL_BYTES = 256 * 2**20  # pages without a budget: a laptop does not notice, and 64 chats with the bundled model fit

# Snapshots without one: a quarter of that, or a few where one is large. Two serve one conversation (its prompt's end, and where its answer has come to),
# and beside 64 state slots of the same size four more do not count.
DEFAULT_SNAPSHOT_BYTES = DEFAULT_POOL_BYTES // 4
LEAST_SNAPSHOTS = 4

_NAMES = tuple(field.name for field in fields(Limits))


@dataclass(frozen=True, slots=True)
class Resolved:
    """Limits, for each field its provenance: "argument", "environment TWINFER_X", "model", "memory" or "default", and the budget (None: no limit)."""

    limits: Limits
    provenance: Mapping[str, str]
    budget_bytes: int | None = None


def resolve_limits(
    model: ModelConfig,
    *,
    explicit: Limits | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    budget_bytes: int | None = None,
    dtype: str | None = None,
    backend: str = "reference",
    device: str = "cpu",
) -> Resolved:
    """Limits for serving `model` in `dtype` (None: the checkpoint's own) within `budget_bytes` (None: TWINFER_MEMORY, else no budget).

    A whole Limits is taken as it is, and checked. Entries of a mapping that are None count as not given. Raises LimitError naming the field or
    variable, the value and the limit.
    """
    environ = environ or {}
    name = dtype or model.dtype
    if budget_bytes is None and MEMORY in environ:
        budget_bytes = parse_bytes(environ[MEMORY])
    if isinstance(explicit, Limits):
        _given({}, environ)  # an unknown variable is told all the same
        check_limits(model, explicit, name, budget_bytes, backend=backend, device=device)
        return Resolved(explicit, dict.fromkeys(_NAMES, "argument"), budget_bytes)
    values, provenance = _given(explicit or {}, environ)

    def default(name: str, value: Any, source: str = "default") -> Any:
        if name not in values:
            values[name], provenance[name] = value, source
        return values[name]

    if "max_context" in values and values["max_context"] > model.max_position:
        raise LimitError(f"max_context = {values['max_context']}: must be at most the model's max_position_embeddings = {model.max_position}")
    own = DEFAULTS[backend]
    context = default("max_context", model.max_position, "model")
    speculative = default("speculative_tokens", 0)
    look_ahead = default("look_ahead", own.look_ahead)
    # A default gives way to what was asked for, so that nobody is told off for a value that they never gave.
    asked_tokens = values.get("max_step_tokens")
    batch = default("max_batch", own.max_batch if asked_tokens is None else max(1, min(own.max_batch, asked_tokens // (1 + speculative))))
    tokens = default("max_step_tokens", max(own.max_step_tokens, batch * (1 + speculative), values.get("max_chunk_tokens", 1)))
    default("max_chunk_tokens", min(tokens, own.max_chunk_tokens))
    default("warmup_tokens", min(own.warmup_tokens, tokens))
    # Each row may list its overshoot on top, and what is counted by reference is indexed in int32.
    most = 2**31 - 1 - batch * (look_ahead + speculative)
    default("max_step_context", max(context, min(batch * context, most)))
    default("max_logit_tokens", own.max_logit_tokens)
    page_size = default("page_size", own.page_size)
    default("num_state_slots", 0 if not model.num_gdn_layers else _bucket(batch, values.get("buckets")))
    for field in fields(Limits):
        if field.name not in ("num_pages", "num_snapshots", "buckets") and field.name not in values:
            default(field.name, field.default)
    if not model.num_gdn_layers:
        default("num_snapshots", 0)
    _check_states(model, values["num_state_slots"], values.get("num_snapshots", 0), page_size)
    given_pages = values.pop("num_pages", None)
    if given_pages is not None:
        limits = Limits(**values, num_pages=given_pages)
        check_limits(model, limits, name, budget_bytes, backend=backend, device=device)
        if "num_snapshots" not in values and budget_bytes is not None:
            default("num_snapshots", spare_snapshots(model, limits, name, budget_bytes, backend=backend, device=device), "memory")
        elif "num_snapshots" not in values:
            default("num_snapshots", _few_snapshots(model, limits, name, backend))
        return Resolved(Limits(**values, num_pages=given_pages), _in_order(provenance), budget_bytes)
    limits = Limits(**values, num_pages=1)
    check_limits(model, limits, name, None)
    if budget_bytes is not None:
        if "num_snapshots" not in values:
            default("num_snapshots", fit_snapshots(model, limits, name, budget_bytes, backend=backend, device=device), "memory")
            limits = Limits(**values, num_pages=1)
        values["num_pages"] = fit_pages(model, limits, name, budget_bytes, backend=backend, device=device)
        provenance["num_pages"] = "memory"
    else:
        one = ceil_div(context + look_ahead + speculative, page_size)
        values["num_pages"] = max(one, min(batch * one, DEFAULT_POOL_BYTES // page_bytes(model, limits, name, backend)))
        provenance["num_pages"] = "default"
        if "num_snapshots" not in values:
            default("num_snapshots", _few_snapshots(model, Limits(**values), name, backend))
    return Resolved(Limits(**values), _in_order(provenance), budget_bytes)


def _few_snapshots(model: ModelConfig, limits: Limits, dtype: str, backend: str) -> int:
    """Snapshots where no budget says how many; 0 for an engine that keeps no states of its own."""
    each = snapshot_bytes(model, limits, dtype, backend)
    return min(max(LEAST_SNAPSHOTS, DEFAULT_SNAPSHOT_BYTES // each), most_snapshots(limits)) if each else 0


def check_limits(model: ModelConfig, limits: Limits, dtype: str, budget_bytes: int | None, *, backend: str = "reference", device: str = "cpu") -> None:
    """Raises LimitError where complete limits contradict the model or a budget, or ask for what no engine does: two sources that disagree are an error."""
    if limits.speculative_tokens:
        raise LimitError(f"speculative_tokens = {limits.speculative_tokens}: must be 0, no engine drafts tokens")
    if limits.max_context > model.max_position:
        raise LimitError(f"max_context = {limits.max_context}: must be at most the model's max_position_embeddings = {model.max_position}")
    _check_states(model, limits.num_state_slots, limits.num_snapshots, limits.page_size)
    if budget_bytes is not None:
        plan_memory(model, limits, dtype, budget_bytes, backend=backend, device=device)


def _bucket(batch: int, buckets: tuple[int, ...] | None) -> int:
    """The smallest bucket that holds a full batch."""
    return next((size for size in buckets or default_buckets(batch) if size >= batch), batch)


def _check_states(model: ModelConfig, num_state_slots: int, num_snapshots: int, page_size: int) -> None:
    """Raises LimitError where a model that keeps states would have no slot for one or no grid to keep it on, or another has some."""
    if model.num_gdn_layers and num_state_slots < 1:
        layers = f"{model.num_gdn_layers} of its {model.num_layers} layers are Gated DeltaNet"
        raise LimitError(f"num_state_slots = {num_state_slots}: must be at least 1, since each sequence that runs holds one: {layers} and keep a state")
    if model.num_gdn_layers and STATE_CHUNK % page_size and page_size % STATE_CHUNK:
        raise LimitError(
            f"page_size = {page_size}: must divide {STATE_CHUNK} or be a multiple of it for a model with Gated DeltaNet layers: their chunks have "
            f"{STATE_CHUNK} tokens, and a state is kept at lengths of whole chunks and whole pages"
        )
    for name, value in (("num_state_slots", num_state_slots), ("num_snapshots", num_snapshots)):
        if value and not model.num_gdn_layers:
            raise LimitError(f"{name} = {value}: must be 0: the model has no Gated DeltaNet layers, so it keeps no states")


def _given(explicit: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What arguments and environment say; an argument wins."""
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for name, value in explicit.items():
        if name not in _NAMES:
            raise LimitError(f"{name!r} is not a limit{_meant(name, _NAMES)}; limits: {', '.join(_NAMES)}")
        if value is not None:
            if name != "buckets" and (isinstance(value, bool) or not isinstance(value, int)):
                raise LimitError(f"{name} = {value!r}: must be an integer")
            values[name], provenance[name] = value, "argument"
    known = {PREFIX + name.upper(): name for name in _NAMES}
    audit = environ.get(AUDIT, "0")
    if audit not in ("", "0", "1"):
        raise LimitError(f"{AUDIT} = {audit!r}: must be 1 (everything is checked) or 0")
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in known:
            raise LimitError(f"{variable} = {text!r}: not a variable that twinfer knows{_meant(variable, (*known, *OTHER_VARIABLES))}")
        name = known[variable]
        try:
            value = tuple(int(part) for part in text.split(",")) if name == "buckets" else int(text)
        except ValueError:
            raise LimitError(f"{variable} = {text!r}: must be an integer") from None
        if name not in values:
            values[name], provenance[name] = value, f"environment {variable}"
    return values, provenance


def _meant(name: str, names: tuple[str, ...]) -> str:
    close = get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _in_order(provenance: Mapping[str, str]) -> dict[str, str]:
    return {name: provenance.get(name, "default") for name in _NAMES}
