"""`twinfer generate`: where the prompt comes from, what goes to which stream, JSON, samples, and Ctrl-C."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import run
from tests.serve.test_examples import TINY
from twinfer.engine import engine as loop
from twinfer.reference.engine import Engine
from twinfer.sampling import SamplingParams
from twinfer.serve.model import bundled

MICRO = ("generate", "--model", "micro")
SHORT = ("--max-tokens", "8")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(bundled("micro").path)


def test_the_text_is_the_engines(engine: Engine) -> None:
    wanted = engine.generate("To be", engine.default_params(max_tokens=12, temperature=0.0))[0].text
    done = run(*MICRO, "To be", "--max-tokens", "12", "--temperature", "0")
    assert (done.code, done.out.rstrip("\n")) == (0, wanted.rstrip("\n"))
    assert done.out.endswith("\n")
    assert not done.out.endswith("\n\n")


def test_alone_the_bundled_model_writes() -> None:
    done = run("generate", *SHORT)
    assert done.code == 0
    assert done.out.strip()
    assert "no prompt given; using 'ROMEO.\\n'" in done.err
    assert "qwen3 (bundled, 2 M parameters) on the reference engine (auto: the device is " in done.err


def test_a_terminal_gets_the_default_prompt_too() -> None:
    assert "no prompt given" in run(*MICRO, *SHORT, typed="never read\n").err


def test_one_prompt_from_each_source(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Tö be\n", encoding="utf-8")
    texts = {
        run(*MICRO, "Tö be\n", *SHORT).out,
        run(*MICRO, "--file", str(file), *SHORT).out,
        run(*MICRO, *SHORT, stdin="Tö be\n").out,
        run(*MICRO, "-", *SHORT, stdin="Tö be\n").out,
        run(*MICRO, "--file", "-", *SHORT, stdin="Tö be\n").out,
    }
    assert len(texts) == 1
    assert texts != {run(*MICRO, "Something else", *SHORT).out}


def test_statistics_go_to_stderr_and_quiet_drops_them() -> None:
    loud, quiet = run(*MICRO, "To be", *SHORT, "--ignore-eos"), run(*MICRO, "To be", *SHORT, "--ignore-eos", "--quiet")
    assert "8 tokens in " in loud.err
    assert "0 from the prefix cache; finish: length" in loud.err
    assert "temperature" in loud.err
    assert (quiet.out, quiet.err) == (loud.out, "")


def test_json_is_the_engines_result(engine: Engine) -> None:
    arguments = {"max_tokens": 6, "n": 3, "seed": 5, "logprobs": 2, "ignore_eos": True}
    wanted = engine.generate("To be", engine.default_params(**arguments))[0]
    done = run(*MICRO, "To be", "--max-tokens", "6", "--n", "3", "--seed", "5", "--logprobs", "2", "--ignore-eos", "--json")
    records: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    assert [r["tokens"] for r in records] == [list(c.tokens) for c in wanted.completions]
    assert [r["text"] for r in records] == [c.text for c in wanted.completions]
    assert [r["sample"] for r in records] == [0, 1, 2]
    assert {r["prompt"] for r in records} == {"To be"}
    assert {r["finish_reason"] for r in records} == {"length"}
    assert {r["prompt_tokens"] for r in records} == {len(wanted.prompt)}
    for record, completion in zip(records, wanted.completions, strict=True):
        assert completion.logprobs is not None
        assert [(e["token"], e["logprob"]) for e in record["logprobs"]] == [(e.token, e.logprob) for e in completion.logprobs]
        assert all(len(e["top"]) == 2 for e in record["logprobs"])


def test_several_samples_are_printed_when_done() -> None:
    done = run(*MICRO, "To be", *SHORT, "-n", "2", "--ignore-eos")
    assert [line for line in done.out.splitlines() if line.startswith("---")] == ["--- sample 1 of 2 (length)", "--- sample 2 of 2 (length)"]


def test_logprobs_are_listed_after_the_text() -> None:
    text = run(*MICRO, "To be", "--max-tokens", "3", "--ignore-eos").out
    done = run(*MICRO, "To be", "--max-tokens", "3", "--ignore-eos", "--logprobs", "1")
    assert done.out.startswith(text)
    assert len(done.out.removeprefix(text).splitlines()) == 3


def test_every_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    limits: list[Any] = []
    add = loop.Engine.add

    def spy(self: loop.Engine, prompt: Any, params: SamplingParams | None = None) -> int:
        assert params is not None
        seen.append(params)
        limits.append(self.limits)
        return add(self, prompt, params)

    monkeypatch.setattr(loop.Engine, "add", spy)
    done = run(
        *MICRO, "To be", "--max-tokens", "5", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.01", "--seed", "3", "--n", "2",
        "--stop", "xyzzy", "--stop", "plugh", "--stop-token-id", "7", "--stop-token-id", "8", "--min-tokens", "2", "--ignore-eos",
        "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logprobs", "1",
        "--max-context", "256", "--max-batch", "3", "--max-step-tokens", "128", "--max-chunk-tokens", "64", "--page-size", "32", "--num-pages", "40",
        "--dtype", "fp64", "--device", "cpu", "--backend", "reference",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert seen == [
        SamplingParams(
            max_tokens=5, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=3, n=2, stop=("xyzzy", "plugh"), stop_token_ids=(7, 8), min_tokens=2,
            ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logprobs=1,
        )
    ]  # fmt: skip
    got = limits[0]
    assert (got.max_context, got.max_batch, got.max_step_tokens, got.max_chunk_tokens, got.page_size, got.num_pages) == (256, 3, 128, 64, 32, 40)
    assert "micro (bundled, 0.2 M parameters) on the reference engine, cpu, float64, 1 thread; " in done.err


def test_checkpoint_defaults_can_be_left_out() -> None:
    assert "(checkpoint)" in run(*MICRO, "To be", *SHORT).err
    assert "plain sampling, temperature 1" in run(*MICRO, "To be", *SHORT, "--no-checkpoint-defaults").err


def test_the_chat_template(engine: Engine) -> None:
    assert engine.tokenizer is not None
    messages = [{"role": "system", "content": "A player."}, {"role": "user", "content": "Who art thou?"}]
    ids = engine.tokenizer.apply_chat_template(messages)
    wanted = engine.generate(ids, engine.default_params(max_tokens=8, seed=1))[0].text
    done = run(*MICRO, "Who art thou?", "--chat", "--system", "A player.", "--seed", "1", *SHORT)
    assert done.out.rstrip("\n") == wanted.rstrip("\n")
    assert f"prompt {len(ids)} tokens" in done.err


def test_a_default_length_does_not_refuse_a_long_prompt() -> None:
    done = run(*MICRO, "abcdefgh" * 6, "--max-context", "64", "--ignore-eos", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["prompt_tokens"] + len(record["tokens"]) == 64


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A config.json and nothing else."""
    (tmp_path / "config.json").write_text(TINY)
    return tmp_path


def made_up(*arguments: str) -> dict[str, Any]:
    done = run("generate", "--temperature", "0", *SHORT, "--json", *arguments)
    assert done.code == 0, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


def test_random_weights_need_no_checkpoint(tiny: Path) -> None:
    by_directory = made_up("--model", str(tiny), "--random-weights", "1", "--prompt-ids", "1,2,3")
    assert by_directory == made_up("--model", str(tiny / "config.json"), "--random-weights", "1", "--prompt-ids", "1 2 3")
    assert (by_directory["prompt"], by_directory["text"], len(by_directory["tokens"])) == ([1, 2, 3], None, 8)
    with Engine.from_pretrained(tiny, random_seed=1) as same:
        wanted = same.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8))[0].completions[0].tokens
        assert by_directory["tokens"] == list(wanted)
    assert by_directory["tokens"] != made_up("--model", str(tiny), "--random-weights", "2", "--prompt-ids", "1,2,3")["tokens"]


def test_without_a_tokenizer_ids_go_in_and_come_out(tiny: Path) -> None:
    random = ("generate", "--model", str(tiny), "--random-weights", "1", "--temperature", "0", *SHORT)
    done = run(*random)
    assert done.code == 0, done.err
    announced = re.search(r"no prompt given and no tokenizer; using --prompt-ids ([\d,]+)\n", done.err)
    assert announced is not None
    again = run(*random, "--prompt-ids", announced[1], "--logprobs", "1")
    assert again.out.startswith(done.out)
    assert re.fullmatch(r"\d+(,\d+){7}\n", done.out)
    assert [line.split()[1] for line in again.out.splitlines()[1:]] == [f"'{token}'" for token in done.out.strip().split(",")]
    two = run(*random, "--n", "2")
    assert two.out.splitlines()[1] == done.out.strip()


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["To be"], None, "prompt = 'To be'"),
        (["--file", "x"], None, "file = 'x'"),
        ([], "To be", "standard input"),
        (["--chat"], None, "chat"),
        (["--stop", "x", "--prompt-ids", "1"], None, "stop = ['x']"),
    ],
)
def test_no_other_models_tokenizer_is_taken(arguments: list[str], stdin: str | None, said: str, tiny: Path) -> None:
    refused = run("generate", *arguments, "--model", str(tiny), "--random-weights", "1", stdin=stdin)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.error_line
    assert "tokenizer" in refused.error_line


def test_random_weights_of_a_model_with_a_tokenizer_write_text() -> None:
    record = made_up("To be", "--model", "micro", "--random-weights", "1", "--ignore-eos")
    assert record["text"]
    assert record["tokens"] != made_up("To be", "--model", "micro", "--ignore-eos")["tokens"]


def test_ids_work_for_any_model(engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("To be")
    by_ids, by_text = (made_up("--model", "micro", *prompt) for prompt in (["--prompt-ids", ",".join(map(str, ids))], ["To be"]))
    assert by_ids == {**by_text, "prompt": ids}


def test_a_checkpoint_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(bundled("micro").path, tmp_path / "model", ignore=shutil.ignore_patterns("goldens", "tokenizer*")))
    record = made_up("--model", str(directory), "--prompt-ids", "72,105")
    assert (record["text"], record["tokens"]) == (None, made_up("--model", "micro", "--prompt-ids", "72,105")["tokens"])


def test_ctrl_c_aborts_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps, aborted = loop.Engine.step, [0], []

    def interrupted(self: loop.Engine) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    abort = loop.Engine.abort
    monkeypatch.setattr(loop.Engine, "step", interrupted)
    monkeypatch.setattr(loop.Engine, "abort", lambda self, request_id: aborted.append(request_id) or abort(self, request_id))
    before = signal.getsignal(signal.SIGINT)
    done = run(*MICRO, "To be", "--max-tokens", "200", "--ignore-eos")
    assert done.code == 130
    assert done.out.strip()
    assert "finish: abort" in done.err
    assert done.err.endswith("finish: abort\ninterrupted\n")
    assert aborted == [0]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(self: loop.Engine) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop.Engine, "step", stuck)
    done = run(*MICRO, "To be")
    assert done.code == 130
    assert "Traceback" not in done.err
