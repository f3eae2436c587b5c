"""Opening a model directory: config, limits, tokenizer and weights, checked in that order, for either engine. It makes no executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinfer.config import DTYPES, ModelConfig
from twinfer.engine.checkpoint import Checkpoint, random_weights
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import ConfigError
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.resolve import MEMORY, resolve_limits
from twinfer.limits import Limits

Check = Callable[[ModelConfig, str, str], None]
# Of the device's free memory, where nobody gives a budget: the rest is for what no bound counts and the runtime reserve underestimates.
MEMORY_FRACTION = 0.95


@dataclass(slots=True)
class Opened:
    """What an engine is made from. `weights` by checkpoint name, on the device."""

    config: ModelConfig
    limits: Limits
    ledger: Ledger
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults | None


def open_pretrained(
    path: str | Path,
    *,
    backend: str,
    limits: Limits | Mapping[str, Any] | None,
    dtype: str | None,
    device: str,
    memory_bytes: int | None,
    tokenizer: bool,
    random_seed: int | None,
    progress: Callable[[int, int], None] | None,
    check: Check | None = None,
    check_limits: Callable[[Limits], None] | None = None,
) -> Opened:
    """Reads a checkpoint directory, or with `random_seed` its config.json alone (`path` may then be that file) and makes weights up.

    check  called with (config, device kind, dtype name) before anything is allocated; raises what an engine can't run on;
    check_limits does the same for the limits that were found

    Raises ConfigError, CheckpointError or LimitError before any weight is read.
    """
    directory = Path(path)
    checkpoint = None
    if random_seed is None:
        checkpoint = Checkpoint.open(directory)
        config = checkpoint.config
    else:
        directory = directory.parent if directory.is_file() else directory
        config = ModelConfig.from_file(directory / "config.json")
    config.check_supported(str(directory / "config.json"))
    name = config.dtype if dtype is None else dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"device = {device!r} is not one that torch knows; for instance cpu, cuda or cuda:0") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device = {device!r}: torch has no CUDA device on this machine; use cpu")
    if check is not None:
        check(config, kind, name)
    if backend == "fast" and kind == "cuda" and memory_bytes is None and MEMORY not in os.environ:
        memory_bytes = int(torch.cuda.mem_get_info(torch.device(device))[0] * MEMORY_FRACTION)
    given = limits if isinstance(limits, Limits) else dict(limits or {})
    resolved = resolve_limits(config, explicit=given, environ=os.environ, budget_bytes=memory_bytes, dtype=name, backend=backend, device=kind).limits
    if check_limits is not None:
        check_limits(resolved)
    wants_text = tokenizer and (checkpoint is not None or (directory / "tokenizer.json").is_file())
    text = Tokenizer.from_directory(directory) if wants_text else None
    defaults = GenerationDefaults.from_directory(directory)
    ledger = Ledger(resolved, config, name)
    target: torch.dtype = getattr(torch, name)
    if checkpoint is not None:
        weights = checkpoint.weights(target, device, progress)
    else:
        assert random_seed is not None, "without a checkpoint there is a seed"
        weights = random_weights(config, random_seed, target, device)
    return Opened(config, resolved, ledger, weights, text, defaults)
