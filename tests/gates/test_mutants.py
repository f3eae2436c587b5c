"""Each gate can fail: broken engines, and for every gate one that it finds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gates.mutants import MUTANTS
from tests.gates.runs import run_gates
from twinfer.invariants import gates

FOLDER = Path(gates.__file__).parent


@pytest.mark.parametrize("name", MUTANTS)
def test_the_gate_goes_red(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    outcome = run_gates(mutant, tmp_path, gates=mutant.killers)
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    assert outcome.tests("failed") == set(mutant.killers), outcome.why


def test_every_gate_finds_a_mutant() -> None:
    found = {killer for mutant in MUTANTS.values() for killer in mutant.killers}
    assert found == all_gates()


def all_gates() -> set[str]:
    """file::test of every gate that is written."""
    return {
        f"{file.name}::{node.name}"
        for file in FOLDER.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
