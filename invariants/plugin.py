"""The pytest plugin that comes with twinfer: its gates over anybody's engine. Loads no gate, no torch and no engine unless --twinfer-engine is given.

    pytest --pyargs twinfer.invariants.gates --twinfer-engine mypkg.mymodule:make_engine

docs/gates.md says what an engine has to offer. Gates without an engine are a usage error, and so is a run in which every gate was skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GATES = Path(__file__).resolve().parent / "gates"
NO_ENGINE = "twinfer's gates need an engine: --twinfer-engine MODULE:FACTORY (twinfer.invariants.gates.adapters:reference is one)"
OPTIONS = ("--twinfer-model", "--twinfer-dtype", "--twinfer-xfail")


def is_gate(item: pytest.Item) -> bool:
    """Whether a test is one of twinfer's gates."""
    return item.path.parent.name == "gates" and item.path.resolve().parent == GATES


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("twinfer", "twinfer's gates over an engine (pytest --pyargs twinfer.invariants.gates)")
    group.addoption("--twinfer-engine", metavar="MODULE:FACTORY", help="what makes the engine under test; or FILE.py:FACTORY")
    group.addoption("--twinfer-model", metavar="MODEL", default="qwen3", help="qwen3 (default), micro, or a checkpoint directory with goldens")
    group.addoption("--twinfer-dtype", metavar="DTYPE", help="dtype that the engine is asked for (default: its own choice)")
    group.addoption("--twinfer-xfail", metavar="FILE", help="gates that are expected to fail, one a line: its id and why")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "twinfer_requires(*capabilities): a gate of twinfer that needs these of the engine under test")
    if config.getoption("--twinfer-engine") is None:
        given = [option for option in OPTIONS if config.getoption(option) not in (None, "qwen3")]
        if given:
            raise pytest.UsageError(f"{given[0]} is given, but no --twinfer-engine MODULE:FACTORY")
        # Told before anything is collected where it can be: xdist's workers can't tell it well.
        if config.getoption("pyargs") and any(argument.startswith("twinfer.invariants.gates") for argument in config.args):
            raise pytest.UsageError(NO_ENGINE)
        return
    # Whatever costs something, or needs a pytest of these days, is loaded here and not before.
    for name in ("fixtures", "session"):
        config.pluginmanager.import_plugin(f"twinfer.invariants.gates.{name}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--twinfer-engine") is None and any(is_gate(item) for item in items):
        raise pytest.UsageError(NO_ENGINE)
