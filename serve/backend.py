"""Which engine a command runs, on which device, and how it is opened. Torch is imported here only when a function is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.errors import ConfigError
from twinfer.serve.failure import BadInput, NotAvailable
from twinfer.serve.model import Model
from twinfer.serve.progress import Bar
from twinfer.serve.threads import check_threads, set_threads

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine
    from twinfer.engine.pretrained import Prepared

# What kernels compute in (fast/device.py and kernels/ have the same, but need torch; a test compares them).
FAST_DTYPES = ("float32", "bfloat16", "float16")
FAST_HEAD_DIMS = (64, 128, 256)
FAST_GDN_HEAD_DIMS = (16, 32, 64, 128)
NO_TRITON = "backend = 'fast': needs Triton, which runs on Linux: pip install 'triton>=3.6,<3.8'; or use --backend reference"


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


def has_triton() -> bool:
    """Whether Triton is installed, without importing it."""
    return find_spec("triton") is not None


def why_not_fast(config: ModelConfig, device: str, dtype: str | None) -> str:
    """Why the fast engine can't run a model on a device in a dtype (None: the checkpoint's), with the remedy; "" where it can."""
    if not has_triton():
        return NO_TRITON
    from twinfer.fast.device import check

    try:
        check(config, device.partition(":")[0], dtype or config.dtype)
    except ConfigError as error:
        return str(error)
    return ""


def choose(backend: Backend, device: str | None, config: ModelConfig, dtype: str | None = None) -> Choice:
    """The engine for --backend and --device, which is to compute a model in `dtype` (None: the checkpoint's).

    Raises BadInput for a device that is not here, ConfigError for what no engine, or not the fast one, can run, NotAvailable where packages are missing.
    """
    where = find_device(device)
    if backend is Backend.REFERENCE:
        return Choice(backend, where, "")
    if backend is Backend.AUTO and not where.startswith("cuda"):
        return Choice(Backend.REFERENCE, where, f"auto: the device is {where}")
    reason = why_not_fast(config, where, dtype)
    if backend is Backend.AUTO:
        return Choice(Backend.REFERENCE, where, f"auto: {reason}") if reason else Choice(Backend.FAST, where, f"auto: the device is {where}")
    if reason:
        raise NotAvailable(reason) if reason == NO_TRITON else ConfigError(reason)
    return Choice(backend, where, "")


def find_device(device: str | None) -> str:
    """The device to use: the one named, else the first GPU, else the CPU. Raises BadInput for one that is not here."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if num_gpus else "cpu"
    here = ["cpu", *(["cuda"] if num_gpus else []), *(f"cuda:{i}" for i in range(num_gpus))]
    if device not in here:
        raise BadInput(f"device = {device!r}: must be one that this machine has: {', '.join(here)}")
    return device


def prepare(
    model: Model,
    choice: Choice,
    *,
    limits: Mapping[str, int],
    dtype: str | None = None,
    memory_bytes: int | None = None,
    random_seed: int | None = None,
    tokenizer: bool = True,
) -> Prepared:
    """Everything of a model but its weights, checked; its `admission` tells which requests the engine will take.

    random_seed  made-up weights instead of the checkpoint's: of the model's directory only config.json must be there
    tokenizer    False: token ids in, token ids out, and none is read
    """
    prepared: Prepared = _engine_class(choice).prepare(
        model.path, limits=dict(limits), dtype=dtype, device=choice.device, memory_bytes=memory_bytes, random_seed=random_seed, tokenizer=tokenizer
    )
    return prepared


def open_engine(prepared: Prepared, choice: Choice, *, seed: int = 0, threads: int | None = None) -> Engine:
    """The engine over a model's weights, with a bar while they load when stderr is a terminal. Torch's threads are set for it (threads.py)."""
    check_threads(threads)
    set_threads(prepared.config.num_parameters, threads)
    with Bar("loading weights") as progress:
        engine: Engine = _engine_class(choice).from_prepared(prepared, seed=seed, progress=progress)
    return engine


def _engine_class(choice: Choice) -> Any:
    return importlib.import_module(f"twinfer.{choice.backend.value}.engine").Engine


def described(model: Model, choice: Choice, engine: Engine) -> str:
    """What runs where, in one line: model, engine and why, device, dtype, and on a CPU the threads."""
    import torch

    why = f" ({choice.reason})" if choice.reason else ""
    dtype = str(engine.ledger.dtype)
    threads = f", {Count(torch.get_num_threads(), 'thread')}" if choice.device == "cpu" else ""
    interpreted = " in Triton's interpreter (slow, for tests)" if choice.backend is Backend.FAST and choice.device == "cpu" else ""
    return f"{model.name} on the {choice.backend} engine{interpreted}{why}, {choice.device}, {dtype}{threads}"
