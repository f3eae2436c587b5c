"""twinfer: what both engines share. Importing it brings in no torch, no transformers and no engine; `twinfer.LLM` is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinfer.config import ModelConfig
from twinfer.errors import TwinferError
from twinfer.limits import Limits
from twinfer.request import Completion, Event, FinishReason, GenerateResult, Request, TokenLogprob
from twinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine
    from twinfer.reference.engine import Engine as LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "Event",
    "FinishReason",
    "GenerateResult",
    "Limits",
    "ModelConfig",
    "Request",
    "SamplingParams",
    "TokenLogprob",
    "TwinferError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return _engine_here()
    if name == "Engine":
        from twinfer.engine.engine import Engine as Base

        return Base
    raise AttributeError(f"module 'twinfer' has no attribute {name!r}")


def _engine_here() -> Any:
    """The engine class that this machine can run: the fast one where torch has a GPU, and Triton compiles for it, else the reference."""
    from importlib.util import find_spec

    import torch

    if torch.cuda.is_available() and find_spec("triton") is not None:
        from twinfer.fast.device import interpreting
        from twinfer.fast.engine import Engine as Fast

        if not interpreting():
            return Fast
    from twinfer.reference.engine import Engine

    return Engine
