"""`twinfer check --law2`: right kernels hold, arithmetic that depends on the batch is found to one bit, and nothing passes that did not come about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.command import interpret, run
from twinfer.config import ModelConfig
from twinfer.fast.executor import FastExecutor
from twinfer.invariants.gates.law2 import Finding, Law2
from twinfer.kernels.matmul.cublas import Products
from twinfer.serve import check
from twinfer.serve.check import FULL, INTERPRETED, QUICK, fitting
from twinfer.serve.failure import BadInput
from twinfer.serve.model import bundled

# One layer, so that the interpreter is done with all schedules in a quarter of a minute; long enough for --quick on a GPU.
ONE_LAYER = """{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
"torch_dtype": "float32"}"""


@pytest.fixture
def one_layer(tmp_path: Path) -> tuple[str, ...]:
    """The words of a command that checks a model of one layer."""
    (tmp_path / "config.json").write_text(ONE_LAYER)
    return ("check", "--law2", str(tmp_path), "--random-weights", "1", "--quick")


def test_the_fast_engine_holds(one_layer: tuple[str, ...]) -> None:
    done = run(*one_layer)
    assert done.code == 0, done.err
    schedules = ["alone", "alone, without graphs", "batch of ", "chunks of ", "mixed steps", "behind ", "after preemption"]
    told = [line for line in done.err.splitlines() if line.endswith(": holds")]
    for schedule in schedules:
        assert any(line.startswith(schedule) for line in told), schedule
        assert f"\u2502 {schedule}" in done.out
    assert "BROKEN" not in done.out
    assert "did not come about" not in done.out


@pytest.fixture
def in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the schedules only the solo run and the first batch: what the wrong engines below get wrong."""

    def two(self: Law2) -> Iterator[Finding]:
        yield self._solo()
        yield self._compare(f"batch of {self.batches[0]}", self.limits, company=self.batches[0] - len(self.prompts))

    monkeypatch.setattr(Law2, "run", two)


def judged(words: tuple[str, ...]) -> tuple[int, list[dict[str, Any]]]:
    done = run(*words, "--json", "--quiet")
    return done.code, [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.usefixtures("in_a_batch")
def test_a_product_whose_form_depends_on_the_batch_is_found(one_layer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """From three rows on the sum over K runs the other way: the same numbers, in another order."""
    right = Products.linear

    def by_size(self: Products, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *bias: Any) -> None:
        if 3 <= len(x) <= 4:
            out.copy_(x.flip(1) @ weight.flip(1).T)
        else:
            right(self, x, weight, out, *bias)

    monkeypatch.setattr(Products, "linear", by_size)
    code, (alone, batch) = judged(one_layer)
    assert (code, alone["verdict"], batch["verdict"]) == (1, "holds", "BROKEN")
    assert 0 < batch["differing"] <= batch["positions"]
    assert batch["first"].keys() == {"request", "position"}


@pytest.mark.usefixtures("in_a_batch")
def test_one_bit_of_one_logit_is_found(one_layer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    right = FastExecutor._show_logits

    def flipped(self: FastExecutor, plan: Any, flat: Any, tap: Any) -> None:
        def changed(plan: Any, flat: Any, first: int, logits: torch.Tensor) -> None:
            if first == 0 and plan.num_rows > 2 and int(flat.positions[0]) == INTERPRETED.lengths[0]:
                logits.view(torch.int32)[0, -1] ^= 1
            tap(plan, flat, first, logits)

        right(self, plan, flat, changed)

    if torch.cuda.is_available():
        pytest.skip("the position is that of the interpreter's prompts")
    monkeypatch.setattr(FastExecutor, "_show_logits", flipped)
    code, (alone, batch) = judged(one_layer)
    assert (code, alone["verdict"]) == (1, "holds")
    assert (batch["differing"], batch["first"]) == (1, {"request": 0, "position": INTERPRETED.lengths[0]})


@pytest.mark.parametrize(
    ("findings", "code", "said"),
    [
        ([Finding("alone", 4), Finding("batch of 4", 4)], 0, "holds"),
        ([Finding("alone", 4), Finding("batch of 4", 4, [(1, 7), (1, 8)])], 1, "request 1, position 7"),
        ([Finding("alone", 4), Finding("behind 2 prefix hits", 4, reached=False)], 1, "did not come about"),
        ([Finding("alone", 4), Finding("batch of 4", 0)], 1, "did not come about"),
        ([], 1, "schedule"),
    ],
)
def test_what_passes(
    findings: list[Finding], code: int, said: str, one_layer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_law2", lambda *arguments: iter(findings))
    done = run(*one_layer)
    assert done.code == code
    assert said in done.out
    if code:
        bad = [finding.schedule for finding in findings if not finding.holds]
        assert done.error_line == f"error: law 2 does not hold in {len(bad)} of {len(findings)} schedules" + (f": {', '.join(bad)}" if bad else "")


@pytest.mark.parametrize("size", [FULL, QUICK, INTERPRETED])
def test_every_size_reaches_what_it_is_for(size: check.Size) -> None:
    """A hit needs a prompt beyond a page; a preemption one whose output outgrows its pages; a chunk one that is longer; the batches fit into buckets."""
    page = size.page_size
    assert any(length > page for length in size.lengths)
    assert any(-(-(length + size.num_tokens - 1) // page) > -(-(length + 1) // page) for length in size.lengths)
    assert all(any(length > chunk for length in size.lengths) and chunk <= size.max_step_tokens for chunk in size.chunks)
    assert max(size.batches) == size.buckets[-1]
    limits = check._limits(size, ModelConfig.from_file(bundled("qwen3").path))
    assert limits.num_pages >= limits.pages_per_context


def test_a_model_with_a_short_context_gets_shorter_prompts() -> None:
    config = ModelConfig.from_file(bundled("micro").path)
    assert fitting(FULL, config).lengths == tuple(n for n in FULL.lengths if n + FULL.num_tokens <= config.max_position)


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(ONE_LAYER.replace('"max_position_embeddings": 256', '"max_position_embeddings": 8'))
    short = ("check", "--law2", str(tmp_path), "--random-weights", "1")
    for words, said in (
        (("check", "micro"), "give --law2"),
        (("check", "--law2", "no/such"), "model = 'no/such'"),
        (("check", "--law2", "micro", "--dtype", "fp64"), "dtype = 'float64'"),
        (("check", "--law2", "micro", "--random-weights", "-1"), "random_weights = -1"),
        (("check", "--law2", "micro", "--threads", "0"), "threads = 0"),
        (short, "max_position_embeddings = 8"),
    ):
        refused = run(*words)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.error_line
    with pytest.raises(BadInput):
        fitting(QUICK, ModelConfig.from_file(tmp_path))
    interpret(monkeypatch, False)
    refused = run("check", "--law2", "micro", "--device", "cpu")
    assert (refused.code, "needs an NVIDIA GPU" in refused.error_line) == (2, True)
