"""Every example that is printed, in --help, the README and docs/, is run as it stands. Only tokens that nobody asked for, and schedules of law 2, are fewer."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from tests.serve.command import INTERPRET, run_line
from twinfer.serve import chat, check, generate
from twinfer.serve.cli import app
from twinfer.serve.parameters import Chosen, choose_params

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "cli.md", ROOT / "docs" / "fast.md")
# The files that the examples name, as the page says to make them.
(FILES,) = re.findall(r"^<!-- command: files -->\n```bash\n(.*?)^```$", PAGES[1].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
TINY, QWEN3_8B = re.findall(r"<<'END'\n(.*?)END\n", FILES, re.DOTALL)


def in_help() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for command in (group, *group.commands.values()):
        yield from re.findall(r"^\s*\$ (.+)$", command.help, re.MULTILINE)


def in_page() -> Iterator[str]:
    """Those of the pages' shell lines that are twinfer's; the README's others are run by CI."""
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if block != FILES:
                yield from (line for line in block.splitlines() if not line.startswith("python3 -m venv"))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the files that the examples name, made by the page's own lines, and replies of a few tokens."""
    subprocess.run(["bash", "-e"], input=FILES, text=True, check=True, cwd=tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == ["Qwen3-8B/config.json", "prompt.txt", "tiny/config.json"]
    monkeypatch.chdir(tmp_path)

    def short(*arguments: Any, **named: Any) -> Chosen:
        chosen = choose_params(*arguments, **named)
        few = min(chosen.params.max_tokens or 6, max(6, chosen.params.min_tokens))
        return dataclasses.replace(chosen, params=dataclasses.replace(chosen.params, max_tokens=few))

    for module in (generate, chat):
        monkeypatch.setattr(module, "choose_params", short)
    right = check.run_law2
    monkeypatch.setattr(check, "run_law2", lambda *arguments: islice(right(*arguments), 1))


def needs_a_gpu(line: str) -> bool:
    return ("--backend fast" in line or "--law2" in line) and not line.startswith(INTERPRET)


@pytest.mark.parametrize("line", dict.fromkeys([*in_help(), *in_page()]))
def test_the_example_runs(line: str) -> None:
    gpu = torch.cuda.is_available()
    if gpu and line.startswith(INTERPRET):
        pytest.skip("Triton was imported to compile")
    done = run_line(line)
    if needs_a_gpu(line) and not gpu:  # as far as it comes without one: it was understood
        assert (done.code, done.out, "the fast engine needs an NVIDIA GPU" in done.error_line) == (2, "", True)
        return
    assert done.code == 0, done.err
    if line != "twinfer chat" and not line.startswith("twinfer chat --system"):  # nobody types here
        assert done.out.strip()


def test_there_are_examples_to_run() -> None:
    assert len(list(in_help())) >= 15
    assert len(list(in_page())) >= 20
    assert any(line.startswith(INTERPRET) and "--backend fast" in line for line in in_page())
    assert any(line.startswith(INTERPRET) and "--law2" in line for line in in_page())
    assert sum("--stop " in line for line in [*in_help(), *in_page()]) >= 2


@pytest.mark.parametrize("line", [line for line in dict.fromkeys([*in_help(), *in_page()]) if "--stop " in line])
def test_an_example_of_stop_stops(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the length that people get, and not because the model ended by itself."""
    for module in (generate, chat):
        monkeypatch.setattr(module, "choose_params", choose_params)
    done = run_line(f"{line} --ignore-eos")
    assert (done.code, "finish: stop" in done.err) == (0, True), done.err
    assert len(done.out.split()) >= 3
    assert not any(text in done.out for text in re.findall(r'--stop "(.)"', line))


@pytest.mark.parametrize("line", ["rm -rf x", "twinfer env > file", "cat x | twinfer chat", "twinfer env && twinfer env"])
def test_a_line_that_is_not_understood_is_no_example(line: str) -> None:
    with pytest.raises(ValueError, match="can run"):
        run_line(line)
