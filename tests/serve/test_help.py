"""Help: it names and explains every option, and it is quick because nothing heavy is imported for it. No times are asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

import twinfer
from tests.serve.command import run
from twinfer.serve.cli import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
HEAVY = ("torch", "transformers", "triton", "z3", "tokenizers", "safetensors", "numpy")


def options(command: str) -> list[str]:
    return [name for parameter in COMMANDS[command].params for name in parameter.opts if name.startswith("--")]


def test_the_commands() -> None:
    assert set(COMMANDS) == {"generate", "chat", "plan", "bounds", "compare", "check", "env"}


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "generate --help", "plan qwen3 --memory 4GiB", "bounds qwen3 --why", "generate --temperature nan"]
)
def test_imports_nothing_heavy(arguments: str) -> None:
    code = (
        "import sys; from twinfer.serve.cli import main\n"
        f"try: main({arguments.split()!r})\n"
        f"except SystemExit: pass\nprint('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    allowed = ["numpy"] if arguments.startswith(("plan", "bounds")) else []
    assert done.stdout.splitlines()[-1] in {f"heavy: {allowed}", "heavy: []"}, done.stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "twinfer.serve", "--version"], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"twinfer {twinfer.__version__}\n"


def test_version() -> None:
    assert run("--version").out == f"twinfer {twinfer.__version__}\n"


def test_alone_it_shows_the_commands() -> None:
    shown = run()
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == run("--help").out == run("-h").out
    for command in COMMANDS:
        assert command in shown.out


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_fills_the_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paragraph is broken where the terminal ends and nowhere else: no line of it could have taken the next one's first word."""
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run(*command.split(), "-h").out
    described = shown[: shown.index("\u256d")].split("Usage:")[1]  # up to the first box
    for paragraph in described.split("\n" + " " * width + "\n")[1:]:
        lines = [line.rstrip() for line in paragraph.splitlines()]
        if lines and not lines[0].startswith("   "):
            for line, following in pairwise(lines):
                assert len(line) + 1 + len(following.split()[0]) > width - 1, f"{line!r} then {following!r}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_explains_every_option(command: str) -> None:
    shown = run(command, "--help")
    assert shown.code == 0
    for parameter in COMMANDS[command].params:
        if parameter.name == "help":
            continue
        assert parameter.help, parameter.name
        for name in parameter.opts:
            assert (name if name.startswith("-") else name.upper()) in shown.out, name
    assert "Examples:" in shown.out
    assert f"$ twinfer {command}" in shown.out


@pytest.mark.parametrize("command", ["", *sorted(COMMANDS)])
def test_help_has_no_names_of_pythons_types(command: str) -> None:
    shown = run(*command.split(), "--help").out
    assert set(re.findall(r"<[^>]*>", shown)) <= {"<auto|reference|fast>"}
    assert not re.search(r"\b(INTEGER|FLOAT|BOOLEAN|PATH|bool|str)\b", shown)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_page_names_every_option(command: str) -> None:
    page = DOCS.read_text(encoding="utf-8")
    section = re.search(rf"^## twinfer {command}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/cli.md has no section for {command}"
    shared = re.search(r"^## Options that several commands share$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert shared is not None
    missing = [name for name in options(command) if name != "--help" and f"`{name}" not in section[1] + shared[1]]
    assert not missing


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_unknown_option_is_refused(command: str) -> None:
    refused = run(command, "--no-such-option")
    assert refused.code == 2
    assert "--no-such-option: no such option" in refused.error_line


def test_an_unknown_command_is_refused() -> None:
    refused = run("serves")
    assert (refused.code, "serves" in refused.err) == (2, True)
