"""`twinfer compare`: right engines pass, a wrong one is found, and no judgement passes on nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.command import interpret, run
from tests.serve.test_examples import TINY
from twinfer.fast.executor import FastExecutor
from twinfer.fast.model import Model
from twinfer.reference.qwen3 import Qwen3
from twinfer.serve.compare import TOLERANCE, judge

MICRO = ("compare", "micro", "--max-tokens", "6")


def test_the_reference_agrees_with_transformers() -> None:
    done = run(*MICRO)
    assert done.code == 0, done.err
    assert done.out.count("transformers") == 3
    assert done.out.count("passed") == 3
    assert "FAILED" not in done.out


@pytest.mark.parametrize(("dtype", "passed", "most"), [("fp64", True, 1e-9), ("fp32", True, TOLERANCE), ("bf16", None, 1.0)])
def test_json_has_the_figures(dtype: str, passed: bool | None, most: float) -> None:
    done = run(*MICRO, "--dtype", dtype, "--prompt", "To be", "--prompt", "or not", "--json", "--quiet")
    assert (done.code, done.err) == (0, "")
    records: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    assert [r["prompt"] for r in records] == [0, 1]
    for record in records:
        assert record["passed"] is passed
        assert record["num_tokens"] == 6
        assert 0 <= record["logprob"] <= most
        assert record["logit"] <= 2 * most


FAST = ("compare", "micro", "--engine", "fast", "--prompt", "To be", "--max-tokens", "3", "--json")


def test_the_fast_engine_agrees_with_the_reference() -> None:
    """In float32, in Triton's interpreter where there is no GPU: every position's logits, and tokens through pages and graphs."""
    done = run(*FAST)
    assert done.code == 0, done.err
    (record,) = map(json.loads, done.out.splitlines())
    assert (record["side"], record["num_tokens"], record["passed"]) == ("fast", 3, True)
    # Another order of the sums, so not the same bits: figures of exactly 0 would be those of one engine compared with itself.
    assert 0 < record["logprob"] < TOLERANCE
    assert 0 < record["logit"] < TOLERANCE


def test_a_wrong_fast_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Model.logits

    def scaled(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        return right(self, hidden).mul_(1.01)

    monkeypatch.setattr(Model, "logits", scaled)
    failed = run(*FAST)
    assert failed.code == 1
    record = json.loads(failed.out)
    assert (record["passed"], record["logprob"] > TOLERANCE) == (False, True)


def test_a_fault_of_decode_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changes no token: the logits of decode steps are a hundredth too large, those of prefill are right."""
    right = Model.forward

    def scaled(self: Model, num_tokens: int, launches: Any) -> torch.Tensor:
        hidden = right(self, num_tokens, launches)
        return hidden.mul_(1.01) if num_tokens == 1 else hidden

    monkeypatch.setattr(Model, "forward", scaled)
    failed = run(*FAST)
    assert failed.code == 1
    record = json.loads(failed.out)
    assert (record["passed"], record["differs_at"], record["logprob"] > TOLERANCE) == (False, None, True)


def test_a_position_that_the_fast_engine_does_not_show_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def show_all_but_one(self: FastExecutor, plan: Any, flat: Any, tap: Any) -> None:
        tap(plan, flat, 1, self.model.logits(self.buffers()["normed"][1 : flat.num_tokens]))

    monkeypatch.setattr(FastExecutor, "_show_logits", show_all_but_one)
    failed = run(*FAST)
    assert failed.code == 1
    record = json.loads(failed.out)
    assert (record["passed"], record["logprob"]) == (False, None)


def test_engines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = run(*MICRO, "--prompt", "To be", "--engine", "transformers", "--json")
    assert [json.loads(line)["side"] for line in named.out.splitlines()] == ["transformers"]
    refused = run(*MICRO, "--engine", "slow")
    assert (refused.code, "engine = 'slow': must be one of fast, transformers" in refused.error_line) == (2, True)
    interpret(monkeypatch, False)
    refused = run(*MICRO, "--device", "cpu", "--engine", "fast")
    assert (refused.code, "set TRITON_INTERPRET=1" in refused.error_line) == (2, True)
    monkeypatch.setattr("twinfer.serve.sides.find_spec", lambda name: None)
    missing = run(*MICRO, "--engine", "transformers")
    assert (missing.code, "pip install transformers" in missing.error_line) == (1, True)


def test_made_up_weights_are_the_same_for_all(tmp_path: Path) -> None:
    """The engines from the seed, transformers from a checkpoint of the same numbers; without a tokenizer the prompts are ids from the seed."""
    (tmp_path / "config.json").write_text(TINY)
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        done = run("compare", model, "--random-weights", "3", "--engine", "transformers", "--max-tokens", "4", "--json")
        assert done.code == 0, done.err
        records = [json.loads(line) for line in done.out.splitlines()]
        assert [record["num_prompt"] for record in records] == [1, 20, 150]
        assert all(record["passed"] and record["logprob"] < TOLERANCE for record in records)
        assert "with random weights (seed 3)" in records[0]["model"]
    given = run("compare", str(tmp_path), "--random-weights", "3", "--max-tokens", "2", "--prompt-ids", "1,2", "--prompt-ids", "3 4 5", "--json")
    assert [json.loads(line)["num_prompt"] for line in given.out.splitlines()] == [2, 3]
    refused = run("compare", str(tmp_path), "--random-weights", "3", "--prompt", "To be")
    assert (refused.code, "has no tokenizer.json" in refused.error_line) == (2, True)


def test_a_wrong_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Qwen3.logits
    monkeypatch.setattr(Qwen3, "logits", lambda self, hidden: right(self, hidden) * 1.01)
    failed = run(*MICRO, "--prompt", "To be")
    assert failed.code == 1
    assert "FAILED" in failed.out
    assert "1 of 1 comparison over the tolerance of 0.001 nat in float32" in failed.error_line


def test_a_wrong_engine_over_a_right_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come from the engine and logits from its model: a fault between the two shows in the tokens."""
    from twinfer.serve import sides

    right = sides.greedy_from
    monkeypatch.setattr(sides, "greedy_from", lambda engine: lambda ids, n: [(t + 1) % 200 for t in right(engine)(ids, n)])
    failed = run(*MICRO, "--prompt", "To be", "--json")
    assert failed.code == 1
    record = json.loads(failed.out)
    assert (record["differs_at"], record["passed"]) == (0, False)
    assert record["margin"] > TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "prompt = ''"),
        (["--max-tokens", "0"], "max_tokens = 0"),
        (["--max-tokens", "9999"], "max_tokens = 9999"),
        (["--dtype", "int8"], "dtype = 'int8'"),
        (["--prompt", "abc" * 50, "--max-context", "16"], "max_context = 16"),
        (["--file", "no/such/file"], "file = 'no/such/file'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    refused = run(*MICRO, *arguments)
    assert (refused.code, said in refused.error_line) == (2, True)


def test_alone_the_reference_has_nothing_to_agree_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from twinfer.serve import sides

    monkeypatch.setattr(sides, "find_spec", lambda name: None)
    refused = run(*MICRO)
    assert (refused.code, "nothing to compare" in refused.error_line) == (1, True)


ROWS = np.array([[3.0, 2.0, 0.0], [0.0, 5.0, 4.9995], [1.0, 0.0, 9.0]])  # prompt of one token, then the tokens 0 and 1


def verdict(theirs: list[int], found: Any) -> bool | None:
    return judge("side", 0, 1, [0, 1], theirs, ROWS, found, True).passed


def test_judgements() -> None:
    assert verdict([0, 1], ROWS) is True
    assert verdict([0, 1], ROWS + 7.0) is True  # a constant changes no token
    assert verdict([0, 1], ROWS * (1 + 1e-6)) is True
    assert verdict([0, 1], ROWS * 1.01) is False
    assert verdict([0, 2], ROWS) is True  # a tie within the tolerance
    assert verdict([1, 1], ROWS) is False
    assert verdict([0], ROWS) is False
    assert verdict([], ROWS) is False
    assert verdict([0, 1], None) is True
    assert verdict([1, 1], None) is False
    assert verdict([0, 1], ROWS * math.nan) is False
    assert verdict([0, 1], np.where(ROWS == 9.0, np.nan, ROWS)) is False
    assert verdict([0, 1], ROWS[:2]) is False


def test_no_judgement_without_a_tolerance() -> None:
    finding = judge("side", 0, 1, [0, 1], [1, 1], ROWS, ROWS * 1.5, False)
    assert (finding.passed, finding.differs_at) == (None, 0)
