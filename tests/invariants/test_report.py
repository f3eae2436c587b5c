"""docs/bounds.md is generated and current, and names every bound and law."""

from __future__ import annotations

from pathlib import Path

from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.laws import LAWS
from twinfer.invariants.report import report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bounds.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == report(), "run: python -m twinfer.invariants.report docs/bounds.md"


def test_everything_is_on_it() -> None:
    text = report()
    for name in [bound.name for bound in BOUNDS] + [law.name for law in LAWS]:
        assert f"`{name}`" in text, name
