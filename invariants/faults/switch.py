"""Switches: contexts in which a piece of twinfer is another one. They patch by name and put back; they import what they patch only when switched on.

A place is "module:name" or "module:Class.name".
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

from twinfer.invariants.auditor import Auditor
from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.expr import Expr
from twinfer.invariants.faults.fault import Switch

_numbers = itertools.count()


class StaleFault(ValueError):
    """A fault no longer applies to the code that it was written for; it must not pass in silence."""


def located(place: str) -> tuple[Any, str]:
    """The module or class of a place, and the name in it."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


def edited(place: str, old: str, new: str) -> Switch:
    """The function, method, property or Triton kernel at `place` is compiled from its source with the one occurrence of `old` replaced by `new`.

    StaleFault when the fragment is not there exactly once.
    """
    return lambda: _edit(place, old, new)


def replaced(place: str, make: Callable[[Any], Any]) -> Switch:
    """What is at `place` is `make` of what was there. Whoever imported the old one by name keeps it: `edited` reaches them too."""
    return lambda: _replace(place, make)


def sized(*names: str, capacity: Callable[[], Expr] | Expr, audited: bool = True) -> Switch:
    """The bounds of these names have another capacity, and their buffers that size. audited False: the auditor still knows the right one."""
    return lambda: _size(names, capacity if isinstance(capacity, Expr) else capacity(), audited)


@contextmanager
def _edit(place: str, old: str, new: str) -> Iterator[None]:
    owner, name = located(place)
    try:
        original = inspect.getattr_static(owner, name)
    except AttributeError:
        raise StaleFault(f"{place}: there is no such thing") from None
    function = _function(original)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise StaleFault(f"{place}: the fragment {old!r} occurs {source.count(old)} times")
    wrong = _compiled(source.replace(old, new), name, function)
    if isinstance(original, FunctionType):
        if original.__code__.co_freevars != wrong.__code__.co_freevars:
            raise StaleFault(f"{place}: a function over variables of another one can't be replaced")
        right = original.__code__
        # In place, so that modules which imported the function by name have the fault too.
        original.__code__ = wrong.__code__
        try:
            yield
        finally:
            original.__code__ = right
        return
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _function(found: Any) -> FunctionType:
    """The plain function inside a method, a property or a Triton kernel."""
    for inner in ("__func__", "fget", "fn"):
        found = getattr(found, inner, None) or found
    function: FunctionType = found
    return function


def _compiled(source: str, name: str, like: FunctionType) -> Any:
    """What `source` defines under `name`, decorators included, among the globals of `like`. Its lines can be read, which Triton does."""
    file = f"<fault {next(_numbers)} in {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    flags = like.__code__.co_flags & __future__.annotations.compiler_flag
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec", flags=flags, dont_inherit=True), vars(sys.modules[like.__module__]), namespace)
    return namespace[name]


@contextmanager
def _replace(place: str, make: Callable[[Any], Any]) -> Iterator[None]:
    owner, name = located(place)
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _size(names: tuple[str, ...], capacity: Expr, audited: bool) -> Iterator[None]:
    right = {name: BY_NAME[name] for name in names}
    wrong = {
        name: replace(bound, capacity=capacity, shape=tuple(capacity if axis == bound.capacity else axis for axis in bound.shape))
        for name, bound in right.items()
    }
    defaults = Auditor.__init__.__kwdefaults__
    assert defaults is not None, "an auditor's bounds are an argument by keyword"
    checked = defaults["bounds"]
    BY_NAME.update(wrong)
    if audited:
        defaults["bounds"] = tuple(wrong.get(bound.name, bound) for bound in checked)
    try:
        yield
    finally:
        BY_NAME.update(right)
        defaults["bounds"] = checked
