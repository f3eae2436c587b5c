"""The reference engine: `twinfer.engine.Engine` over a ReferenceExecutor, and how it is made from a checkpoint. No decisions of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinfer.engine import engine
from twinfer.engine.pretrained import open_pretrained
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
        random_seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Opens a checkpoint directory in Hugging Face format.

        limits    a whole Limits, or some of its fields; the rest come from TWINFER_* variables, the model, the memory and defaults
        dtype     float64, float32, bfloat16 or float16; None is the checkpoint's own
        memory_bytes  what the engine may use in all; the pages get what weights and buffers leave
        tokenizer False: token ids in, token ids out, and no tokenizer.json is needed
        random_seed   made-up weights from this seed: config.json is all that is read of the model
        progress  called with (tensors loaded, tensors in all)

        Raises ConfigError, CheckpointError or LimitError before any weight is read.
        """
        opened = open_pretrained(
            path, backend="reference", limits=limits, dtype=dtype, device=device, memory_bytes=memory_bytes, tokenizer=tokenizer,
            random_seed=random_seed, progress=progress,
        )  # fmt: skip
        executor = ReferenceExecutor(opened.config, opened.limits, opened.weights, opened.ledger)
        return cls(
            executor, opened.config, opened.limits, ledger=opened.ledger, tokenizer=opened.tokenizer, defaults=opened.defaults, seed=seed,
            prefix_cache=prefix_cache, audit=audit,
        )  # fmt: skip
