"""Limits of a model on a kind of device, as the engine there would find them, from config.json alone. Neither weights, torch nor the device need be here.

`twinfer plan` and `twinfer bounds` start from it; what they show is theirs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.errors import ConfigError, LimitError
from twinfer.serve import options as o
from twinfer.serve.backend import FAST_DTYPES, FAST_GDN_HEAD_DIMS, FAST_HEAD_DIMS, NO_TRITON, Backend, why_not_fast
from twinfer.serve.failure import BadInput, NotAvailable
from twinfer.serve.model import Model, find

if TYPE_CHECKING:
    from twinfer.invariants.resolve import Resolved

DEVICES = ("cuda", "cpu")
KindOption = Annotated[str, typer.Option("--device", metavar="KIND", help="cuda or cpu: whose runtime reserve counts; it need not be here.")]


@dataclass(frozen=True, slots=True)
class Planned:
    """A model, the engine and kind of device that it is planned for, the dtype, and its limits with where each came from."""

    place: Model
    config: ModelConfig
    dtype: str
    engine: str
    device: str
    resolved: Resolved


def planned(
    model: str, *, memory: str | None, dtype: str | None, backend: Backend, device: str, explicit: Mapping[str, int]
) -> Planned:
    """Finds them. Raises BadInput, ConfigError, LimitError (with another kind of device where that would do) or NotAvailable."""
    place = find(model, allow_config=True)
    budget = o.given_memory(memory)
    if device not in DEVICES:
        raise BadInput(f"device = {device!r}: must be one of {', '.join(DEVICES)}")
    config = ModelConfig.from_file(place.path)
    name = config.dtype if dtype is None else dtype_name(dtype)
    engine = _engine(backend, device, config, name)

    from twinfer.invariants.resolve import resolve_limits

    def resolve(kind: str) -> Resolved:
        which = _engine(backend, kind, config, name)
        return resolve_limits(config, explicit=explicit, environ=os.environ, budget_bytes=budget, dtype=name, backend=which, device=kind)

    try:
        resolved = resolve(device)
    except LimitError as error:
        raise LimitError(f"{error}{_elsewhere(resolve, device)}") from None
    return Planned(place, config, name, engine, device, resolved)


def _elsewhere(resolve: Callable[[str], Resolved], device: str) -> str:
    """A remedy for what does not fit on `device`: another kind on which the same command does, or nothing. `resolve` raises where it does not."""
    from twinfer.invariants.memory import RUNTIME_RESERVE
    from twinfer.invariants.size import format_bytes

    for other in DEVICES:
        with contextlib.suppress(LimitError, BadInput, ConfigError, NotAvailable):
            if other != device and resolve(other):
                return f"; --device {other}, whose runtime reserve is {format_bytes(RUNTIME_RESERVE[other])}, would do"
    return ""


def _engine(backend: Backend, device: str, config: ModelConfig, dtype: str) -> str:
    """The engine that is planned for. Raises BadInput for what the fast engine does not compute, ConfigError or NotAvailable where it can't run.

    A GPU need not be here. On a CPU the fast engine runs in Triton's interpreter or not at all, and that is a matter of this process: the answer is that
    of `twinfer generate`, since a plan of what can't be run would mislead.
    """
    wrong = ""
    if dtype not in FAST_DTYPES:
        wrong = f"dtype = {dtype!r}: the fast engine computes in {', '.join(FAST_DTYPES)}; --backend reference has {dtype}"
    elif config.head_dim not in FAST_HEAD_DIMS:
        wrong = f"head_dim = {config.head_dim}: the fast engine has {', '.join(map(str, FAST_HEAD_DIMS))}; --backend reference has any"
    else:
        for name in ("key_head_dim", "value_head_dim") if config.gdn is not None else ():
            if getattr(config.gdn, name) not in FAST_GDN_HEAD_DIMS:
                dims = ", ".join(map(str, FAST_GDN_HEAD_DIMS))
                wrong = f"linear_{name} = {getattr(config.gdn, name)}: the fast engine has {dims}; --backend reference has any"
    if backend is Backend.AUTO:
        backend = Backend.FAST if device == "cuda" and not wrong else Backend.REFERENCE
    if backend is Backend.FAST:
        if wrong:
            raise BadInput(wrong)
        reason = why_not_fast(config, device, dtype) if device == "cpu" else ""
        if reason:
            raise NotAvailable(reason) if reason == NO_TRITON else ConfigError(reason)
    return backend.value
