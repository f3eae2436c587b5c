"""docs/bounds.md is generated and current, and names every bound and law."""

from __future__ import annotations

from pathlib import Path

from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.laws import LAWS
from twinfer.invariants.report import main, report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bounds.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == report(), "run: python -m twinfer.invariants.report docs/bounds.md"


def test_everything_is_on_it() -> None:
    text = report()
    for name in [bound.name for bound in BOUNDS] + [law.name for law in LAWS]:
        assert f"`{name}`" in text, name


def test_each_buffer_is_in_one_table() -> None:
    lines = report().split("## Laws")[0].splitlines()
    for bound in BOUNDS:
        assert sum(line.startswith(f"| `{bound.name}` |") for line in lines) == 1, bound.name


def test_check_tells_a_stale_page(tmp_path: Path) -> None:
    page = tmp_path / "bounds.md"
    assert main(["--check", str(page)]) == 1
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("max_batch", "num_pages", 1), encoding="utf-8")
    assert main(["--check", str(page)]) == 1
