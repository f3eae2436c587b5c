"""The reference engine: `twinfer.engine.Engine` over a ReferenceExecutor, and how it is made from a checkpoint. No decisions of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from twinfer.config import DTYPES
from twinfer.engine import engine
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import ConfigError
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.resolve import resolve_limits
from twinfer.limits import Limits
from twinfer.reference.executor import ReferenceExecutor


class Engine(engine.Engine):
    """Runs anywhere torch does; slow on purpose. Make one with `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        limits: Limits | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        memory_bytes: int | None = None,
        seed: int = 0,
        prefix_cache: bool = True,
        audit: str | None = None,
        tokenizer: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Opens a checkpoint directory in Hugging Face format.

        limits    a whole Limits, or some of its fields; the rest come from TWINFER_* variables, the model, the memory and defaults
        dtype     float64, float32, bfloat16 or float16; None is the checkpoint's own
        memory_bytes  what the engine may use in all; the pages get what weights and buffers leave
        tokenizer False: token ids in, token ids out, and no tokenizer.json is needed
        progress  called with (tensors loaded, tensors in all)

        Raises ConfigError, CheckpointError or LimitError before any weight is read.
        """
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        name = config.dtype if dtype is None else dtype
        if name not in DTYPES:
            raise ConfigError(f"dtype = {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        try:
            kind = torch.device(device).type
        except RuntimeError:
            raise ConfigError(f"device = {device!r} is not one that torch knows; for instance cpu, cuda or cuda:0") from None
        given = limits if isinstance(limits, Limits) else dict(limits or {})
        limits = resolve_limits(
            config, explicit=given, environ=os.environ, budget_bytes=memory_bytes, dtype=name, backend="reference", device=kind
        ).limits
        text = Tokenizer.from_directory(path) if tokenizer else None
        defaults = GenerationDefaults.from_directory(path)
        ledger = Ledger(limits, config, name)
        weights = checkpoint.weights(getattr(torch, name), device, progress)
        executor = ReferenceExecutor(config, limits, weights, ledger)
        return cls(
            executor,
            config,
            limits,
            ledger=ledger,
            tokenizer=text,
            defaults=defaults,
            seed=seed,
            prefix_cache=prefix_cache,
            audit=audit,
        )
