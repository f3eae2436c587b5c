"""One Limits: engine, scheduler, auditor, ledger and executor hold the very same object, which cannot change after buffers were made from it.

Buffers built from two values of one limit are a fault of a public engine (docs/known_faults.md).
"""

from __future__ import annotations

import dataclasses

import pytest

from twinfer.golden import MICRO
from twinfer.limits import Limits
from twinfer.reference import Engine

from .ghosts import GhostEngine, limits


@pytest.mark.parametrize("kind", ["ghost", "reference"])
def test_everybody_reads_the_same_object(kind: str) -> None:
    within = limits()
    engine = GhostEngine(within) if kind == "ghost" else Engine.from_pretrained(MICRO, limits=within)
    holders = {"engine": engine, "scheduler": engine.scheduler, "auditor": engine.auditor, "ledger": engine.ledger, "executor": engine.executor}
    assert {name for name, holder in holders.items() if holder.limits is not within} == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Limits)])
def test_it_cannot_be_changed(field: str) -> None:
    within = limits()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(within, field, 1)
    assert isinstance(within.buckets, tuple)
