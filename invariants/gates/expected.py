"""The file of --twinfer-xfail: gates that are expected to fail, and why. It is strict; running gates is the plugin's.

One line a gate: its id (file::test[parameters]), white space, the reason. Empty lines and lines that begin with # say nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest


def read(path: Path) -> dict[str, str]:
    """Reasons by gate. Raises pytest.UsageError naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"--twinfer-xfail {path}: {error}") from error
    expected: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, reason = line.strip().partition(" ") if "\t" not in line else line.strip().partition("\t")
        if "::" not in name:
            raise pytest.UsageError(f"{path}:{number}: {name!r} must be the id of a gate, file::test[parameters]")
        if not reason.strip():
            raise pytest.UsageError(f"{path}:{number}: {name} needs a reason after its id")
        if name in expected:
            raise pytest.UsageError(f"{path}:{number}: {name} is listed twice")
        expected[name] = reason.strip()
    return expected


def check(expected: Mapping[str, str], collected: set[str], gates: Path, partly: bool) -> None:
    """Raises pytest.UsageError for an id that no gate has.

    collected  ids of this run's gates
    partly     the command line selects single tests, so that a test may be there without all of its parameters
    """
    tests = {name.partition("[")[0] for name in collected}
    for name in expected:
        test = name.partition("[")[0]
        known = name in collected if test in tests and not partly else _exists(test, gates)
        if not known:
            near = sorted(other for other in collected if other.partition("[")[0] == test)
            raise pytest.UsageError(f"--twinfer-xfail: no gate is called {name}" + (f"; there is {', '.join(near)}" if near else ""))


def _exists(test: str, gates: Path) -> bool:
    """Whether a gate that was not collected is written in its file."""
    file, _, function = test.partition("::")
    path = gates / file
    if "/" in file or not path.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
