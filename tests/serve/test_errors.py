"""What can be wrong with a command: each is one line that names the field, the value and the limit, with exit code 2, or 1 for a failure."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import interpret, run
from twinfer.reference.executor import ReferenceExecutor
from twinfer.serve.failure import BAD_INPUT, FAILED, INTERRUPTED
from twinfer.serve.model import bundled

MICRO = ("generate", "--model", "micro", "--max-tokens", "4")

# Arguments of `generate --model micro --max-tokens 4`, and what the line must say.
BAD = [
    (["x", "--temperature", "nan"], ["temperature = nan", "a number from 0"]),
    (["x", "--temperature", "-1"], ["temperature = -1", "from 0"]),
    (["x", "--max-tokens", "-3"], ["max_tokens = -3", "at least 1"]),
    (["x", "--max-tokens", "0"], ["max_tokens = 0", "at least 1"]),
    (["x", "--top-k", "-1"], ["top_k = -1", "at least 0"]),
    (["x", "--top-p", "0"], ["top_p = 0", "above 0 and at most 1"]),
    (["x", "--min-p", "2"], ["min_p = 2", "from 0 to 1"]),
    (["x", "--seed", "-1"], ["seed = -1", "from 0 to"]),
    (["x", "--n", "0"], ["n = 0", "from 1 to"]),
    (["x", "--stop", ""], ["stop = ['']", "length at least 1"]),
    (["x", "--stop-token-id", "256"], ["stop_token_ids = 256", "from 0 to 255"]),
    (["x", "--repetition-penalty", "0"], ["repetition_penalty = 0", "above 0"]),
    (["x", "--logprobs", "21"], ["logprobs = 21", "at most max_logprobs = 20"]),
    (["x", "--n", "1025"], ["n = 1025", "from 1 to 1024", "send several requests"]),
    (["x", "--min-tokens", "9"], ["min_tokens = 9", "at most max_tokens = 4"]),
    (["x", "--max-tokens", "5000"], ["max_tokens = 5000", "at most max_context - prompt = "]),
    (["abc" * 40, "--max-context", "16"], ["prompt = ", " tokens: must be at most max_context = 16 tokens"]),
    ([""], ["prompt", "''", "at least 1 character"]),
    (["x", "--file", "y"], ["prompt = 'x'", "file = 'y'", "one of them"]),
    (["--file", "no/such/file"], ["file = 'no/such/file'", "No such file"]),
    (["--file", "."], ["file = '.'", "directory"]),
    (["x", "--backend", "fast", "--device", "cpu", "--dtype", "float64"], ["dtype = 'float64'", "the fast engine computes in float32"]),
    (["x", "--random-weights", "-1"], ["random_weights = -1", "from 0 to"]),
    (["x", "--random-weights", "1", "--model", __file__], ["model = ", "must be named config.json"]),
    (["x", "--prompt-ids", "1,2"], ["prompt = 'x'", "prompt_ids = '1,2'", "one of them"]),
    (["--file", "y", "--prompt-ids", "1,2"], ["file = 'y'", "prompt_ids = '1,2'", "one of them"]),
    (["--prompt-ids", "1,b"], ["prompt_ids = '1,b'", "such as 1,2,3"]),
    (["--prompt-ids", ","], ["prompt_ids = ','", "such as 1,2,3"]),
    (["--prompt-ids", "1,256"], ["prompt[1] = 256", "from 0 to 255"]),
    (["--prompt-ids", "1", "--chat"], ["prompt_ids = '1'", "a chat template takes text"]),
    (["x", "--dtype", "int8"], ["dtype = 'int8'", "float32"]),
    (["x", "--device", "tpu"], ["device = 'tpu'", "cpu"]),
    (["x", "--device", "cuda:99"], ["device = 'cuda:99'", "cpu"]),
    (["x", "--memory", "lots"], ["memory = 'lots': not a size", "141GiB"]),
    (["x", "--memory", "1KiB"], ["memory"]),
    (["x", "--max-batch", "0"], ["max_batch", "0"]),
    (["x", "--page-size", "-4"], ["page_size", "-4"]),
    (["x", "--max-context", "5000000"], ["max_context", "5000000"]),
    (["x", "--model", "no/such/model"], ["model = 'no/such/model'", "no such directory", "qwen3 (2 M parameters), micro (0.2 M)"]),
    (["x", "--model", __file__], ["model = ", "must be a directory", "--random-weights 1"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(a)[:40] for a, _ in BAD])
def test_bad_input_is_one_line(arguments: list[str], said: list[str]) -> None:
    refused = run(*MICRO, *arguments)
    line = refused.error_line
    assert all(part in line for part in said), line
    assert (refused.code, refused.out) == (2, "")


def test_the_fast_engine_on_a_cpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = (*MICRO, "x", "--backend", "fast", "--device", "cpu")
    interpret(monkeypatch, False)
    refused = run(*fast)
    assert (refused.code, refused.out) == (2, "")
    for part in ("device = 'cpu'", "needs an NVIDIA GPU", "--backend reference", "set TRITON_INTERPRET=1"):
        assert part in refused.error_line
    interpret(monkeypatch, True)
    refused = run(*fast, "--dtype", "bf16")
    assert (refused.code, "use --dtype float32" in refused.error_line) == (2, True)


def test_without_triton_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinfer.serve.backend.has_triton", lambda: False)
    refused = run(*MICRO, "x", "--backend", "fast")
    # That a package is missing is no fault of the input's form.
    assert (refused.code, refused.out) == (1, "")
    assert "pip install 'triton>=3.6,<3.8'" in refused.error_line
    assert "use --backend reference" in refused.error_line


# Whole command lines that typer refuses; the words are ours all the same.
USAGE = [
    (["generate", "--top-k", "abc"], "top_k = 'abc': must be an integer; `twinfer generate -h` lists what there is"),
    (["generate", "--top-k=1.5"], "top_k = '1.5': must be an integer; `twinfer generate -h` lists what there is"),
    (["chat", "-t", "warm"], "temperature = 'warm': must be a number; `twinfer chat -h` lists what there is"),
    (["chat", "--backend", "x"], "backend = 'x': must be one of 'auto', 'reference', 'fast'; `twinfer chat -h` lists what there is"),
    (["generate", "--stop-token-id", "1", "--stop-token-id", "x"], "stop-token-id"),
    (["generate", "--top-k"], "'--top-k' requires an argument; `twinfer generate"),
    (["generate", "a", "b"], "unexpected extra argument"),
    (["generate", "--tempratur", "1"], "--tempratur: no such option (did you mean --temperature?); `twinfer generate -h` lists what there is"),
    (["plan"], "missing argument 'MODEL'; `twinfer plan -h` lists what there is"),
    (["serves"], "no such command 'serves'"),
    (["--traceback"], "missing command; `twinfer -h` lists what there is"),
]


@pytest.mark.parametrize(("words", "said"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_what_typer_refuses_is_told_in_the_same_way(words: list[str], said: str) -> None:
    refused = run(*words)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.error_line
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize(("data", "said"), [(b"", "at least 1 character"), (b"\x80\x81", "byte 0 (0x80)"), (b"ok \xff\xfe\x00", "byte 3 (0xff)")])
def test_a_prompt_that_is_no_text(data: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(data)
    from_file, from_stdin = run(*MICRO, "--file", str(file)), run(*MICRO, stdin=data)
    assert (from_file.code, from_stdin.code) == (2, 2)
    assert said in from_file.error_line
    assert str(file) in from_file.error_line
    assert said in from_stdin.error_line
    assert "standard input" in from_stdin.error_line


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the smallest model, to be broken."""
    return Path(shutil.copytree(bundled("micro").path, tmp_path / "model", ignore=shutil.ignore_patterns("goldens")))


def test_a_model_without_config(broken: Path) -> None:
    (broken / "config.json").unlink()
    refused = run("generate", "x", "--model", str(broken))
    assert (refused.code, "config.json: no such file" in refused.error_line) == (2, True)


def test_a_model_of_another_type(broken: Path) -> None:
    (broken / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused = run("generate", "x", "--model", str(broken))
    assert (refused.code, "model_type 'gpt2' is not supported" in refused.error_line) == (2, True)


def test_a_model_without_weights(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    refused = run("generate", "x", "--model", str(broken))
    assert refused.code == 2
    for part in ("model.safetensors", "--random-weights 1", "random_seed=1"):
        assert part in refused.error_line
    (broken / "tokenizer.json").unlink()  # a config.json alone: what is missing first is the weights
    assert run("generate", "x", "--model", str(broken)).error_line == refused.error_line
    done = run("generate", "--model", str(broken), "--random-weights", "1", "--max-tokens", "2")
    assert done.code == 0, done.err


def test_a_model_without_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").unlink()
    refused = run("generate", "x", "--model", str(broken))
    assert (refused.code, "tokenizer.json: no such file" in refused.error_line) == (2, True)


def test_what_the_checkpoint_asks_for_in_vain_is_said(broken: Path) -> None:
    file = broken / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_beams": 4}))
    done = run("generate", "x", "--model", str(broken), "--max-tokens", "2")
    assert done.code == 0
    assert "warning: " in done.err
    assert "num_beams = 4 is not honoured" in done.err


def test_exit_codes_are_those_that_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each stands for is tested one by one in this folder; here, that the page, the help and the code name the same four."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", page.split("| exit code |")[1].split("\n\n")[0], re.MULTILINE)]
    in_help = re.search(r"Exit codes: (.*?)\.", run("-h").out)
    assert in_help is not None
    assert [int(code) for code in re.findall(r"\d+", in_help[1])] == documented
    monkeypatch.setattr("twinfer.serve.backend.has_triton", lambda: False)
    seen = {run(*MICRO, "x").code, run(*MICRO, "x", "--backend", "fast").code, run(*MICRO, "x", "--top-k", "-1").code}

    def interrupted(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("twinfer.engine.checkpoint.Checkpoint.open", interrupted)
    stopped = run(*MICRO, "x")
    assert (stopped.out, stopped.err) == ("", "interrupted\n")
    seen.add(stopped.code)
    assert seen == {0, FAILED, BAD_INPUT, INTERRUPTED} == set(documented)


def test_a_failed_step_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, plan: Any) -> Any:
        raise ArithmeticError("two\nlines")

    monkeypatch.setattr(ReferenceExecutor, "_compute", fail)
    failed = run(*MICRO, "x")
    assert failed.code == 1
    assert "ArithmeticError" in failed.error_line


def test_a_lost_executor_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Any, plan: Any) -> Any:
        raise RuntimeError("device gone")

    monkeypatch.setattr(ReferenceExecutor, "launch", lose)
    failed = run(*MICRO, "x")
    assert (failed.code, "executor reference was lost: RuntimeError: device gone" in failed.error_line) == (1, True)


@pytest.mark.parametrize(("raised", "said"), [(MemoryError("no room"), "lower --memory"), (RuntimeError("odd\nfault"), "this is a fault in twinfer")])
def test_a_fault_of_our_own_has_no_traceback(raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise raised

    monkeypatch.setattr("twinfer.engine.checkpoint.Checkpoint.open", fail)
    failed = run(*MICRO, "x")
    assert (failed.code, said in failed.error_line) == (1, True)
    assert "Traceback" in run("--traceback", *MICRO, "x").err
