"""The fast engine: `twinfer.engine.Engine` over a FastExecutor, and how it is made from a checkpoint. No decisions of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from twinfer.engine import engine
from twinfer.engine.pretrained import open_pretrained
from twinfer.fast.device import check, check_limits
from twinfer.fast.executor import FastExecutor
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
        memory_bytes: int | None = None,
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
        place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        opened = open_pretrained(
            path, backend="fast", limits=limits, dtype=dtype, device=place, memory_bytes=memory_bytes, tokenizer=tokenizer,
            random_seed=random_seed, progress=progress, check=check, check_limits=check_limits,
        )  # fmt: skip
        executor = FastExecutor(opened.config, opened.limits, opened.weights, opened.ledger, graphs=graphs)
        return cls(
            executor, opened.config, opened.limits, ledger=opened.ledger, tokenizer=opened.tokenizer, defaults=opened.defaults, seed=seed,
            prefix_cache=prefix_cache, audit=audit,
        )  # fmt: skip
