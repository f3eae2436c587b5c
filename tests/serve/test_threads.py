"""`--threads`: which number torch gets. No time is asserted; what the default rests on is measured and said in serve/threads.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.serve.command import run
from twinfer.config import ModelConfig
from twinfer.serve.model import BUNDLED, CHOICES, bundled, millions
from twinfer.serve.threads import SMALL_MODEL, threads_for

CLEAN = {"PATH": "/bin", "OMP_NUM_THREADS": ""}


@pytest.mark.parametrize(
    ("parameters", "given", "environ", "wanted"),
    [
        (2_164_800, None, CLEAN, 1),
        (SMALL_MODEL - 1, None, CLEAN, 1),
        (SMALL_MODEL, None, CLEAN, None),
        (8_190_735_360, None, CLEAN, None),
        (2_164_800, None, {"OMP_NUM_THREADS": "2"}, None),
        (2_164_800, None, {"MKL_NUM_THREADS": "2"}, None),
        (2_164_800, 3, {"OMP_NUM_THREADS": "2"}, 3),
        (8_190_735_360, 3, CLEAN, 3),
    ],
)
def test_which_number(parameters: int, given: int | None, environ: dict[str, str], wanted: int | None) -> None:
    assert threads_for(parameters, given, environ) == wanted


def test_the_pages_name_the_size_that_counts() -> None:
    told = f"below {SMALL_MODEL // 10**6} M parameters"
    assert (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8").count(told) == 2  # what it does, and the table of options
    assert told in run("generate", "-h").out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch is asked for, on a made-up machine of 4 CPUs; the process keeps its own number."""
    import torch

    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize("command", ["generate x --model micro --max-tokens 2", "chat --model micro --max-tokens 2", "compare micro --max-tokens 2"])
def test_every_command_that_runs_a_model_has_it(command: str, asked: list[int]) -> None:
    assert run(*command.split(), "--threads", "3", stdin="hi\n").code == 0
    assert set(asked) == {3}
    asked.clear()
    assert run(*command.split(), stdin="hi\n").code == 0
    assert set(asked) == {1}


@pytest.mark.parametrize("threads", ["0", "-1", "5"])
def test_more_than_the_machine_has_is_refused(threads: str, asked: list[int]) -> None:
    refused = run("generate", "x", "--model", "micro", "--threads", threads)
    assert (refused.code, asked) == (2, [])
    assert f"threads = {threads}: must be an integer from 1 to 4, the CPUs of this machine" in refused.error_line


def test_sizes_of_the_bundled_models_are_the_checkpoints() -> None:
    sizes = {name: millions(ModelConfig.from_file(bundled(name).path).num_parameters) for name in BUNDLED}
    assert f"qwen3 ({sizes['qwen3']} parameters), micro ({sizes['micro']})" == CHOICES
    assert bundled("qwen3").name == f"qwen3 (bundled, {sizes['qwen3']} parameters)"
    assert [millions(n) for n in (180_800, 2_164_800, 14_700_000, 8_190_735_360)] == ["0.2 M", "2 M", "15 M", "8,191 M"]
