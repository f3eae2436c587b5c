"""Opening a model directory, in two steps: first everything but the weights (config, limits, tokenizer), checked in that order, then the weights.

Between the two a request can be checked (`Prepared.admission`), so that one that can't be served is refused before gigabytes are read. It makes no
executor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinfer.config import ModelConfig, dtype_name
from twinfer.engine.admission import Admission
from twinfer.engine.checkpoint import Checkpoint, check_present, random_weights
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import ConfigError
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.resolve import MEMORY, resolve_limits
from twinfer.invariants.size import parse_bytes
from twinfer.limits import Limits
from twinfer.models import directory_of

Check = Callable[[ModelConfig, str, str], None]
# Of the device's free memory, where nobody gives a budget: the rest is for what no bound counts and the runtime reserve underestimates.
MEMORY_FRACTION = 0.95


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an engine is made from, its weights apart. `random_seed`: they are made up from it; None: they are the directory's."""

    directory: Path
    config: ModelConfig
    limits: Limits
    ledger: Ledger
    dtype: torch.dtype
    device: str
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    random_seed: int | None

    @property
    def admission(self) -> Admission:
        """Checks requests as the engine will."""
        return Admission(self.config, self.limits, self.tokenizer, self.defaults)

    def weights(
        self, progress: Callable[[int, int], None] | None = None, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The weights by checkpoint name, on the device; those in `into` are loaded into its tensors.

        `progress(done, total)` is called after each tensor that is read. Raises CheckpointError.
        """
        if self.random_seed is not None:
            return random_weights(self.config, self.random_seed, self.dtype, self.device, into)
        return Checkpoint.open(self.directory).weights(self.dtype, self.device, progress, into)


def prepare(
    path: str | Path,
    *,
    backend: str,
    limits: Limits | Mapping[str, Any] | None,
    dtype: str | None,
    device: str,
    memory_bytes: int | str | None,
    tokenizer: bool,
    random_seed: int | None,
    check: Check | None = None,
    check_limits: Callable[[Limits], None] | None = None,
) -> Prepared:
    """Reads a checkpoint directory but for its weights, or with `random_seed` its config.json alone (`path` may then be that file).

    path   a bundled model's name, too, where no such directory exists
    check  called with (config, device kind, dtype name) before anything is allocated; raises what an engine can't run on;
    check_limits does the same for the limits that were found

    Raises ConfigError, CheckpointError or LimitError.
    """
    directory = directory_of(path, with_weights=random_seed is None)
    config = ModelConfig.from_file(directory / "config.json")
    if random_seed is None:
        check_present(directory)
    name = config.dtype if dtype is None else dtype_name(dtype)
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
    elif isinstance(memory_bytes, str):
        memory_bytes = parse_bytes(memory_bytes)
    given = limits if isinstance(limits, Limits) else dict(limits or {})
    resolved = resolve_limits(config, explicit=given, environ=os.environ, budget_bytes=memory_bytes, dtype=name, backend=backend, device=kind).limits
    if check_limits is not None:
        check_limits(resolved)
    wants_text = tokenizer and (random_seed is None or (directory / "tokenizer.json").is_file())
    text = Tokenizer.from_directory(directory) if wants_text else None
    defaults = GenerationDefaults.from_directory(directory)
    return Prepared(directory, config, resolved, Ledger(resolved, config, name), getattr(torch, name), device, text, defaults, random_seed)
