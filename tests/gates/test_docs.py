"""docs/gates.md is code: its engine runs, its commands print what it says, its tables are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates.mutants import MUTANTS
from tests.gates.test_mutants import all_gates
from twinfer.invariants.gates.adapter import CAPABILITIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [block.strip() for kind, block in BLOCKS if kind == "bash"]


def table(name: str) -> dict[str, str]:
    """First and second column of a marked table."""
    match = re.search(rf"<!-- table: {name} -->\n\|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
    assert match is not None
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", match[1], re.MULTILINE))


def run(command: str, place: Path) -> subprocess.CompletedProcess[str]:
    """A command of the page, as from a shell in an empty directory."""
    program, *arguments = command.split()
    assert program == "pytest"
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "--import-mode=importlib", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the page's two files."""
    here = tmp_path_factory.mktemp("acme")
    (engine,) = (block for kind, block in BLOCKS if kind == "python")
    (expected,) = (block for _, block in BLOCKS if block.startswith("# expected.txt"))
    (here / "acme.py").write_text(engine)
    (here / "expected.txt").write_text(expected)
    return here


def shown(after: str) -> list[str]:
    """Lines of the first text block behind a command."""
    at = next(i for i, (_, block) in enumerate(BLOCKS) if block.strip() == after)
    return next(block for kind, block in BLOCKS[at:] if kind == "text").splitlines()


def test_the_worked_example_finds_what_the_page_says(place: Path) -> None:
    command = COMMANDS[1]
    done = run(command, place)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    failure, *summary = shown(command)
    test, error, found = failure.split(": ")
    assert re.search(rf"^_+ {test} _+$", done.stdout, re.MULTILINE)
    assert re.search(rf"^E  .*{error}: {found}", done.stdout, re.MULTILINE)
    for line in summary:
        assert line in done.stdout.splitlines(), done.stdout


def test_with_the_expected_failure_the_worked_example_is_green(place: Path) -> None:
    command = COMMANDS[2]
    done = run(command, place)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    for line in shown(command):
        assert line in done.stdout.splitlines(), done.stdout


def test_the_adapter_is_as_short_as_the_page_says() -> None:
    (engine,) = (block for kind, block in BLOCKS if kind == "python")
    body = engine[engine.index("class Acme") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30


def test_the_first_command_passes_what_transformers_offers(tmp_path: Path) -> None:
    done = run(f"{COMMANDS[0]} -rp", tmp_path)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    golden = {gate.partition("::")[2] for gate in all_gates() if gate.startswith("test_golden.py")}
    found = set(re.findall(r"^PASSED .*::(\w+)", done.stdout, re.MULTILINE))
    assert found == golden | {"test_batch_mates_change_nothing", "test_the_same_call_gives_the_same_bits"}


def test_each_command_is_run() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("page", ["README.md", "docs/gates.md"])
def test_the_figures_are_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"{len(MUTANTS)} broken engines" in text
    if page == "README.md":
        (told,) = re.findall(r"(\d+) situations", text)
        assert f"\n{told} gates: " in PAGE  # which the worked example is held against


def test_the_tables_are_the_code() -> None:
    assert table("capabilities") == dict(CAPABILITIES)
    assert set(table("gates")) == {gate.partition("::")[2] for gate in all_gates()}
