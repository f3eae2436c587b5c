"""The reference engine: pure PyTorch, written to be read. `Engine` is loaded when first used, so that its parts can be imported alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinfer.reference.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from twinfer.reference.engine import Engine

        return Engine
    raise AttributeError(f"module 'twinfer.reference' has no attribute {name!r}")
