"""How many examples a property gets: a fixed number in CI, more under `--hypothesis-profile=soak`. Not a test.

SOAK_FACTOR (default 20) says how many times more, for as long as one likes.
"""

from __future__ import annotations

import os

from hypothesis import settings


def examples(usual: int) -> int:
    """max_examples of a property that CI runs `usual` times."""
    return usual * int(os.environ.get("SOAK_FACTOR", "20")) if settings.get_current_profile_name() == "soak" else usual


def repeatable() -> bool:
    """derandomize of a property: CI makes the same draws each time, a soak makes new ones. A failure prints a decorator that repeats it."""
    return settings.get_current_profile_name() != "soak"
