"""The plugin: nothing until asked, no green run that looked at nothing, a strict file of expected failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gates.mutants import MUTANTS
from tests.gates.runs import HOST, Outcome, run_gates
from tests.gates.test_mutants import FOLDER
from twinfer.invariants.gates.adapter import Answer, Ask, Setup
from twinfer.invariants.gates.adapters import reference

NEXT = "test_golden.py::test_next_token_after_each_length"
LONG = "test_golden.py::test_next_token_after_a_long_prompt"
OFF = MUTANTS["log_probabilities_are_off_by_a_hundredth"]


class Nothing:
    """An adapter that answers, but that no gate is run with."""

    dtype = "float32"
    capabilities: Any = frozenset()

    def __init__(self, setup: Setup) -> None:
        pass

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        return [Answer((0,) * ask.max_tokens) for ask in asks]


def command(*arguments: str, place: Path) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, in another directory than the checkout's."""
    line = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_other_peoples_test_runs_load_nothing(tmp_path: Path) -> None:
    heavy = ("torch", "numpy", "transformers", "safetensors", "twinfer.invariants.gates", "twinfer.golden")
    lines = ["import sys", "def test_own():", f"    assert not set({heavy!r}) & set(sys.modules)", "    assert 'twinfer.invariants.plugin' in sys.modules"]
    (tmp_path / "test_own.py").write_text("\n".join(lines))
    done = command("test_own.py", "-q", place=tmp_path)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "gates" not in done.stdout


@pytest.mark.parametrize("how", [("--pyargs", "twinfer.invariants.gates"), (str(FOLDER / "test_golden.py"),), ("-n2", "--pyargs", "twinfer.invariants.gates")])
def test_gates_without_an_engine_are_a_usage_error(how: tuple[str, ...], tmp_path: Path) -> None:
    done = command(*how, place=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "gates need an engine: --twinfer-engine MODULE:FACTORY" in done.stderr


def test_an_option_without_an_engine_is_a_usage_error(tmp_path: Path) -> None:
    done = command("--twinfer-xfail", "x", place=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--twinfer-xfail is given, but no --twinfer-engine" in done.stderr


def refused(place: Path, capfd: pytest.CaptureFixture[str], *arguments: str, make: Any = Nothing) -> str:
    """What pytest says to a run that it refuses."""
    assert run_gates(make, place, *arguments).code == pytest.ExitCode.USAGE_ERROR
    return capfd.readouterr().err


ENGINES = {
    "nonsense": "must be MODULE:FACTORY or FILE.py:FACTORY",
    "no_such_module:make": "ModuleNotFoundError: No module named 'no_such_module'",
    "absent.py:make": "FileNotFoundError: no file absent.py",
    f"{HOST}:absent": "has no attribute 'absent'",
    f"{HOST}:__name__": "is a str, not a function that makes an adapter",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_not_there(engine: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = refused(tmp_path, capfd, "--twinfer-engine", engine)
    assert f"--twinfer-engine {engine}: " in told
    assert ENGINES[engine] in told


def test_a_model_and_a_dtype_that_are_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--twinfer-model absent: must be qwen3, micro, or a checkpoint directory with goldens" in refused(
        tmp_path, capfd, "--twinfer-model", "absent"
    )
    assert "--twinfer-dtype int8: must be one of float64" in refused(tmp_path, capfd, "--twinfer-dtype", "int8")


LISTS = {
    f"{NEXT}": "needs a reason after its id",
    f"{NEXT} why\n{NEXT} why": ":2: test_golden.py::test_next_token_after_each_length is listed twice",
    "golden why": "'golden' must be the id of a gate",
    "test_golden.py::test_absent why": "no gate is called test_golden.py::test_absent",
    "test_absent.py::test_absent why": "no gate is called test_absent.py::test_absent",
    "../gates/test_golden.py::test_generated_tokens why": "no gate is called",
    "test_golden.py::test_logprobs_of_a_prompt why": "there is test_golden.py::test_logprobs_of_a_prompt[2049], test_golden.py::test_logprobs_of_a_prompt[257]",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_expected_failures_that_is_wrong(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.txt").write_text(text)
    assert LISTS[text] in refused(tmp_path, capfd, "--twinfer-xfail", str(tmp_path / "list.txt"))


def test_a_list_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(tmp_path, capfd, "--twinfer-xfail", str(tmp_path / "list.txt"))


def with_list(make: Callable[[Setup], Any], place: Path, text: str, *gates: str) -> Outcome:
    (place / "list.txt").write_text(text)
    return run_gates(make, place, "--twinfer-xfail", str(place / "list.txt"), gates=gates)


def test_an_expected_failure_is_green_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the list names gates of another file, and tests of this one that were not asked for."""
    text = f"# why\n\n{NEXT}\toff, issue 7\ntest_pages.py::test_a_refusal_holds_nothing it does\n{LONG} elsewhere\n"
    outcome = with_list(OFF, tmp_path, text, NEXT)
    assert (outcome.code, outcome.gates) == (pytest.ExitCode.OK, {NEXT: "skipped"})  # as pytest reports an expected failure
    assert "1 gates: 0 passed, 0 failed, 1 failed as expected, 0 skipped" in capfd.readouterr().out


def test_an_unexpected_pass_is_a_failure(tmp_path: Path) -> None:
    outcome = with_list(reference, tmp_path, f"{NEXT} it can't be right\n", NEXT)
    assert (outcome.code, outcome.gates) == (pytest.ExitCode.TESTS_FAILED, {NEXT: "failed"})
    assert "it can't be right" in outcome.why[NEXT]


def test_an_expected_failure_that_is_skipped_is_a_failure(tmp_path: Path) -> None:
    gate = "test_pages.py::test_a_refusal_holds_nothing"
    outcome = with_list(Nothing, tmp_path, f"{gate} it does\n", gate)
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    assert f"{gate} is listed as an expected failure, but it was skipped: Skipped: needs pages: " in outcome.why[gate]


def test_an_engine_that_cannot_be_made_is_never_expected(tmp_path: Path) -> None:
    def make(setup: Setup) -> Any:
        raise AssertionError("no device")

    outcome = with_list(make, tmp_path, f"{NEXT} it is slow\n", NEXT)
    assert (outcome.code, outcome.gates) == (pytest.ExitCode.TESTS_FAILED, {NEXT: "failed"})
    assert "EngineNotMade: AssertionError: no device" in outcome.why[NEXT]


def test_a_run_that_skips_everything_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_gates(Nothing, tmp_path, gates=("test_pages.py", "test_chunking.py"))
    assert set(outcome.gates.values()) == {"skipped"}
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    told = capfd.readouterr().out
    assert "FAILED: every gate was skipped, nothing was looked at" in told
    assert "skipped: 5 no pages, 6 no set_chunk" in told


def test_selecting_no_gate_is_no_green_run(tmp_path: Path) -> None:
    assert run_gates(Nothing, tmp_path, "-k", "no_such_gate").code == pytest.ExitCode.NO_TESTS_COLLECTED


def test_wrong_tokens_are_found_without_log_probabilities(tmp_path: Path) -> None:
    outcome = run_gates(Nothing, tmp_path, gates=("test_golden.py",))
    assert outcome.tests("failed") == {NEXT, LONG, "test_golden.py::test_generated_tokens"}
    assert outcome.tests("skipped") == {"test_golden.py::test_logprobs_of_a_prompt"}


def test_a_capability_that_nobody_knows(tmp_path: Path) -> None:
    class Odd(Nothing):
        capabilities = {"telepathy"}

    outcome = run_gates(Odd, tmp_path, gates=(NEXT,))
    assert "AdapterError: Odd.capabilities holds 'telepathy'" in outcome.why[NEXT]
