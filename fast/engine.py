"""The fast engine: `twinfer.engine.Engine` over a FastExecutor, and how it is made from a checkpoint. No decisions of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from twinfer.engine import engine
from twinfer.engine.pretrained import Prepared, prepare
from twinfer.fast.device import check, check_limits
from twinfer.fast.executor import FastExecutor
from twinfer.fast.weights import Joined
from twinfer.invariants.auditor import check_level
from twinfer.limits import Limits


class Engine(engine.Engine):
    """Serves on an NVIDIA GPU; in Triton's interpreter (TRITON_INTERPRET=1) it runs on a CPU, for tests. Make one with `from_pretrained`."""

    executor: FastExecutor

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        limits: Limits | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        device: str | None = None,
        memory_bytes: int | str | None = None,
        seed: int = 0,
        prefix_cache: bool = True,
        audit: str | None = None,
        tokenizer: bool = True,
        random_seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        graphs: bool | None = None,
    ) -> Engine:
        """As `twinfer.reference.Engine.from_pretrained`, with two differences.

        device  None: cuda where torch has one, else cpu
        graphs  False: every step is launched kernel by kernel (same bits, slower). None: graphs where there is a GPU

        Raises ConfigError, CheckpointError or LimitError before any weight is read.
        """
        prepared = cls.prepare(
            path, limits=limits, dtype=dtype, device=device, memory_bytes=memory_bytes, tokenizer=tokenizer, random_seed=random_seed
        )
        return cls.from_prepared(prepared, seed=seed, prefix_cache=prefix_cache, audit=audit, progress=progress, graphs=graphs)

    @classmethod
    def prepare(
        cls,
        path: str | Path,
        *,
        limits: Limits | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        device: str | None = None,
        memory_bytes: int | str | None = None,
        tokenizer: bool = True,
        random_seed: int | None = None,
    ) -> Prepared:
        """The first half of `from_pretrained`: everything but the weights. Its `admission` tells which requests the engine will take."""
        place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        return prepare(
            path, backend="fast", limits=limits, dtype=dtype, device=place, memory_bytes=memory_bytes, tokenizer=tokenizer, random_seed=random_seed,
            check=check, check_limits=check_limits,
        )  # fmt: skip

    @classmethod
    def from_prepared(
        cls,
        prepared: Prepared,
        *,
        seed: int = 0,
        prefix_cache: bool = True,
        audit: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        graphs: bool | None = None,
    ) -> Engine:
        """The second half: reads the weights. Raises CheckpointError, and ValueError for an unknown `audit` before that."""
        check_level(audit)
        joined = Joined(prepared.config, prepared.dtype, prepared.device)
        weights = prepared.weights(progress, joined.parts)
        executor = FastExecutor(prepared.config, prepared.limits, weights, prepared.ledger, joined=joined, graphs=graphs)
        engine = cls(
            executor, prepared.config, prepared.limits, ledger=prepared.ledger, tokenizer=prepared.tokenizer, defaults=prepared.defaults, seed=seed,
            prefix_cache=prefix_cache, audit=audit,
        )  # fmt: skip
        executor.watch_allocations = engine.auditor.level == "full"
        return engine
