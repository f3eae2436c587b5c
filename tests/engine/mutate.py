"""Swaps a fragment of one method's source for another, to show that a gate can fail. Not a test; production code has no switches."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def mutated(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """While inside, `owner.name` (a method of a class or a function of a module) is compiled from its source with `old` replaced by `new`.

    Raises ValueError when the fragment is not there exactly once: a mutant that no longer applies must not pass silently.
    """
    original = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(old) != 1:
        raise ValueError(f"{owner.__name__}.{name}: the fragment {old!r} occurs {source.count(old)} times")
    module = sys.modules[getattr(original, "fget", original).__module__] if inspect.isclass(owner) else owner
    namespace: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), f"<mutant of {name}>", "exec"), vars(module), namespace)
    setattr(owner, name, namespace[name])
    try:
        yield
    finally:
        setattr(owner, name, original)
