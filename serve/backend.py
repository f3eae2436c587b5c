"""Which engine a command runs, on which device, and how it is opened. Torch is imported here only when a function is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from twinfer.config import DTYPES, ModelConfig
from twinfer.serve.failure import BadInput, NotAvailable
from twinfer.serve.model import Model
from twinfer.serve.progress import Bar
from twinfer.serve.threads import check_threads, set_threads

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine

SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

FAST_MISSING = "backend = 'fast': the fast engine is not in this build; use --backend reference"


class Backend(StrEnum):
    """Values of --backend."""

    AUTO = "auto"
    REFERENCE = "reference"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and its device, and in words why `auto` took it ("" where it was named)."""

    backend: Backend
    device: str
    reason: str


def fast_is_here() -> bool:
    """Whether this build has the fast engine."""
    try:
        return find_spec("twinfer.fast.engine") is not None
    except ModuleNotFoundError:
        return False


def choose(backend: Backend, device: str | None) -> Choice:
    """The engine for --backend and --device. Raises BadInput for a device that is not here, NotAvailable for an engine that is not."""
    where = _device(device)
    if backend is Backend.FAST:
        if not fast_is_here():
            raise NotAvailable(FAST_MISSING)
        if not where.startswith("cuda"):
            raise BadInput(f"backend = 'fast': needs a CUDA device, the device is {where!r}; use --backend reference")
        return Choice(backend, where, "")
    if backend is Backend.REFERENCE:
        return Choice(backend, where, "")
    if not where.startswith("cuda"):
        return Choice(Backend.REFERENCE, where, f"auto: the device is {where}")
    if not fast_is_here():
        return Choice(Backend.REFERENCE, where, "auto: the fast engine is not in this build")
    return Choice(Backend.FAST, where, f"auto: the device is {where}")


def _device(device: str | None) -> str:
    """The device to use: the one named, else the first GPU, else the CPU."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if num_gpus else "cpu"
    here = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{i}" for i in range(num_gpus))]
    if device not in here:
        raise BadInput(f"device = {device!r}: must be one that this machine has: {', '.join(here)}")
    return device


def dtype_name(dtype: str | None) -> str | None:
    """A dtype's full name. Raises BadInput for one that no engine has."""
    name = SHORT_DTYPES.get(dtype, dtype) if dtype is not None else None
    if name is not None and name not in DTYPES:
        raise BadInput(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})")
    return name


def open_engine(
    model: Model,
    choice: Choice,
    *,
    limits: Mapping[str, int],
    dtype: str | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> Engine:
    """The engine over a model's weights, with a bar while they load when stderr is a terminal. Torch's threads are set for it (threads.py)."""
    check_threads(threads)
    set_threads(ModelConfig.from_file(model.path).num_parameters, threads)
    made: Any = importlib.import_module(f"twinfer.{choice.backend.value}.engine")
    with Bar("loading weights") as progress:
        engine: Engine = made.Engine.from_pretrained(
            model.path, limits=dict(limits), dtype=dtype, device=choice.device, memory_bytes=memory_bytes, seed=seed, progress=progress
        )
    return engine


def described(model: Model, choice: Choice, engine: Engine) -> str:
    """What runs where, in one line: model, engine and why, device, dtype, and on a CPU the threads."""
    import torch

    why = f" ({choice.reason})" if choice.reason else ""
    dtype = str(engine.ledger.dtype)
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if choice.device == "cpu" else ""
    return f"{model.name} on the {choice.backend} engine{why}, {choice.device}, {dtype}{threads}"
