"""The Triton engine. `twinfer.fast.Engine` loads torch and Triton when first used; without Triton it says what to do."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinfer.fast.engine import Engine as Engine


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module 'twinfer.fast' has no attribute {name!r}")
    if find_spec("triton") is None:
        raise ImportError("the fast engine needs Triton, which runs on Linux: pip install 'triton>=3.6,<3.8', or use twinfer.reference.Engine")
    from twinfer.fast.engine import Engine

    return Engine
