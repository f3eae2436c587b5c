"""Fault: a small wrong version of one piece of twinfer that can be switched on, and the gates that must see it. Production code has no switches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Switch = Callable[[], AbstractContextManager[None]]

# What is wrong: the size of a buffer, a rule of plans, what decides, what carries plans out, a Triton kernel, the plain model, the drawing of tokens,
# or one of the checks themselves.
KINDS = ("bound", "law", "scheduler", "executor", "kernel", "model", "sampling", "checker")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the catalogue.

    name    a few words, unique
    what    one sentence: what it does to whom
    kind    of KINDS
    red     names of the gates (gate.GATES) that must fail while it is on
    switch  makes a context in which the fault is on
    link    where a public engine had it ("" where we know of none)
    """

    name: str
    what: str
    kind: str
    red: tuple[str, ...]
    switch: Switch
    link: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.name!r}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if not self.red:
            raise ValueError(f"fault {self.name!r} names no gate that must see it")

    def on(self) -> AbstractContextManager[None]:
        """While inside, the fault is there for everybody in this process."""
        return self.switch()
