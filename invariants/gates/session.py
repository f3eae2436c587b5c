"""One pytest session with an engine: marks its gates, applies the expected failures, counts, and fails a run that looked at nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from twinfer.invariants.gates import expected as expected_failures
from twinfer.invariants.gates.fixtures import find_factory, find_setup
from twinfer.invariants.plugin import GATES, is_gate

NAME = "twinfer_gate"  # the property that marks a gate's reports, also across xdist's workers


def pytest_configure(config: pytest.Config) -> None:
    """Reads everything that was given before anything is collected. Raises pytest.UsageError."""
    find_factory(config.getoption("--twinfer-engine"))
    find_setup(config)
    file = config.getoption("--twinfer-xfail")
    config.pluginmanager.register(GateRun(config, {} if file is None else expected_failures.read(Path(file))), "twinfer_gate_run")


def gate_id(item: pytest.Item) -> str:
    """A gate's name wherever the package is installed: file::test[parameters]."""
    return f"{item.path.name}::{item.name}"


class GateRun:
    """Counts by gate; with xdist, from the reports that its workers send."""

    def __init__(self, config: pytest.Config, expected: dict[str, str]) -> None:
        self.config, self.expected = config, expected
        self.outcomes: dict[str, str] = {}
        self.skips: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        gates = {gate_id(item): item for item in items if is_gate(item)}
        for name, item in gates.items():
            item.user_properties.append((NAME, name))
        partly = any("::" in argument for argument in self.config.args)
        expected_failures.check(self.expected, set(gates), GATES, partly)
        for name, reason in self.expected.items():
            if name in gates:
                gates[name].add_marker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail") and is_gate(item) and gate_id(item) in self.expected:
            report.outcome = "failed"
            report.longrepr = f"{gate_id(item)} is listed as an expected failure, but it was skipped: {_reason(report)}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get(NAME)
        if name is None:
            return
        if report.failed:
            self.outcomes[str(name)] = "failed"
        elif report.skipped and hasattr(report, "wasxfail"):
            self.outcomes[str(name)] = "failed as expected"
        elif report.skipped:
            self.outcomes[str(name)] = "skipped"
            why = _reason(report)
            needs = re.search(r"needs (\w+)", why)
            self.skips[f"no {needs[1]}" if needs else "not reached" if "not reached" in why else "otherwise"] += 1
        elif report.when == "call":
            self.outcomes[str(name)] = "passed"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.outcomes and set(self.outcomes.values()) == {"skipped"}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = Counter(self.outcomes.values())
        terminalreporter.section(f"twinfer gates: {self.config.getoption('--twinfer-engine')}")
        figures = ", ".join(f"{count[outcome]} {outcome}" for outcome in ("passed", "failed", "failed as expected", "skipped"))
        terminalreporter.line(f"{len(self.outcomes)} gates: {figures}")
        if self.skips:
            terminalreporter.line("skipped: " + ", ".join(f"{number} {why}" for why, number in sorted(self.skips.items())))
        if self.outcomes and set(count) == {"skipped"}:
            terminalreporter.line("FAILED: every gate was skipped, nothing was looked at")


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped: pytest tells it as (file, line, reason)."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
