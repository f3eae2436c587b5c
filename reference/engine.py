"""The reference engine: `twinfer.engine.Engine` over a ReferenceExecutor, and how it is made from a checkpoint. No decisions of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinfer.engine import engine
from twinfer.engine.pretrained import Prepared, prepare
from twinfer.invariants.auditor import check_level
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
        memory_bytes: int | str | None = None,
        seed: int = 0,
        prefix_cache: bool = True,
        audit: str | None = None,
        tokenizer: bool = True,
        random_seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Opens a checkpoint directory in Hugging Face format, or a bundled model by its name ("qwen3", "micro").

        limits    a whole Limits, or some of its fields; the rest come from TWINFER_* variables, the model, the memory and defaults
        dtype     float64, float32, bfloat16 or float16 (fp64, fp32, bf16, fp16); None is the checkpoint's own
        memory_bytes  what the engine may use in all, as a number or a text ("64GiB"); the pages get what weights and buffers leave
        tokenizer False: token ids in, token ids out, and no tokenizer.json is needed
        random_seed   made-up weights from this seed: config.json is all that is read of the model
        progress  called with (tensors loaded, tensors in all)

        Raises ConfigError, CheckpointError or LimitError before any weight is read.
        """
        prepared = cls.prepare(
            path, limits=limits, dtype=dtype, device=device, memory_bytes=memory_bytes, tokenizer=tokenizer, random_seed=random_seed
        )
        return cls.from_prepared(prepared, seed=seed, prefix_cache=prefix_cache, audit=audit, progress=progress)

    @classmethod
    def prepare(
        cls,
        path: str | Path,
        *,
        limits: Limits | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        memory_bytes: int | str | None = None,
        tokenizer: bool = True,
        random_seed: int | None = None,
    ) -> Prepared:
        """The first half of `from_pretrained`: everything but the weights. Its `admission` tells which requests the engine will take."""
        return prepare(
            path, backend="reference", limits=limits, dtype=dtype, device=device, memory_bytes=memory_bytes, tokenizer=tokenizer,
            random_seed=random_seed,
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
    ) -> Engine:
        """The second half: reads the weights. Raises CheckpointError, and ValueError for an unknown `audit` before that."""
        check_level(audit)
        executor = ReferenceExecutor(prepared.config, prepared.limits, prepared.weights(progress), prepared.ledger)
        return cls(
            executor, prepared.config, prepared.limits, ledger=prepared.ledger, tokenizer=prepared.tokenizer, defaults=prepared.defaults, seed=seed,
            prefix_cache=prefix_cache, audit=audit,
        )  # fmt: skip
