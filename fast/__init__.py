"""The Triton executor's place; its interface is settled in `twinfer.executor`, its code comes with the fast-engine work."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "Engine":
        raise ImportError("the fast engine is not in this build: use twinfer.reference.Engine, or --backend reference")
    raise AttributeError(f"module 'twinfer.fast' has no attribute {name!r}")
