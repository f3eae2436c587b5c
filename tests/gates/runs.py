"""Runs the gates inside a test, in this process. Not a test."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HOST = "twinfer_gates_under_test"  # a module that exists while the gates run, with `make` in it


@dataclass(slots=True, eq=False)  # pytest keeps plugins in sets
class Outcome:
    """What became of each gate, by file::test[parameters]: passed, failed, skipped; and why the failed ones did."""

    code: int = -1
    gates: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get("twinfer_gate")
        if name is not None and (report.when == "call" or report.outcome != "passed"):
            self.gates[str(name)] = report.outcome
            self.why[str(name)] = str(report.longrepr)

    def tests(self, outcome: str) -> set[str]:
        """Gates, without parameters, of which any had this outcome."""
        return {name.partition("[")[0] for name, had in self.gates.items() if had == outcome}


def run_gates(make: Callable[[Any], Any], place: Path, *arguments: str, gates: tuple[str, ...] = (), model: str = "micro") -> Outcome:
    """Runs `gates` (file::test; all if none are named) over what `make` makes, in the empty directory `place`."""
    host: Any = types.ModuleType(HOST)
    host.make = make
    sys.modules[HOST] = host
    outcome = Outcome()
    (place / "pytest.ini").write_text("[pytest]\n")
    named = [f"twinfer.invariants.gates.{gate.replace('.py', '', 1)}" for gate in gates] or ["twinfer.invariants.gates"]
    options = [f"--rootdir={place}", f"-c={place / 'pytest.ini'}", "--import-mode=importlib", "-q", "--no-header", "--tb=short"]
    try:
        outcome.code = int(
            pytest.main(
                [*options, "-p", "no:cacheprovider", "--pyargs", *named, "--twinfer-engine", f"{HOST}:make", "--twinfer-model", model, *arguments],
                plugins=[outcome],
            )
        )
    finally:
        del sys.modules[HOST]
    return outcome
