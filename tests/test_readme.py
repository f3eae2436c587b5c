"""The README is code: its Python runs, its commands are the ones CI runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    written = capsys.readouterr().out
    assert len(re.findall(r"[a-z]{2,}", written)) >= 20, f"no English came out: {written!r}"


@pytest.mark.parametrize("name", ["run", "test"])
def test_marked_commands_are_found(name: str) -> None:
    script = ROOT / "tools" / "readme_commands.py"
    printed = subprocess.run([sys.executable, str(script), str(ROOT / "README.md"), name], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("python3 -m venv .venv && ")
    assert printed in README


def test_an_unmarked_command_is_an_error() -> None:
    script = ROOT / "tools" / "readme_commands.py"
    done = subprocess.run([sys.executable, str(script), str(ROOT / "README.md"), "absent"], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "absent" in done.stderr


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_file_named_in_the_readme_exists() -> None:
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z0-9_]*(?:\.py)?)`", README):
        assert (ROOT / name).exists(), name
