"""Law 2 through the gate that GPUs run, over `micro` in the interpreter: the same bits in every schedule. Attention alone: tests/kernels/test_attention.py.

In the interpreter a product's sum is put in order (tests/kernels/order.py). What a matrix unit does is shown on the GPU, by `twinfer check --law2`.
Contexts stay within one tile of keys here, where a token costs a tenth of a second: how attention goes on from tile to tile is that test's.
"""

from __future__ import annotations

import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE
from tests.kernels.order import sum_in_order
from twinfer.engine.engine import Engine
from twinfer.fast.sampling import Sampling
from twinfer.golden import MICRO
from twinfer.invariants.gates.law2 import Finding, Law2, Recorder
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.matmul.kernel import matmul
from twinfer.limits import Limits

TEXT = list(b"Once more unto the breach, dear friends")
# With the first token after it each prompt fills its pages, and both together the pool: the next page is somebody else's.
PROMPTS = (TEXT[:17], TEXT[20:25])
LIMITS = Limits(
    max_batch=4, max_step_tokens=24, max_chunk_tokens=24, warmup_tokens=1, max_context=24, max_step_context=96, max_logit_tokens=16, page_size=6,
    num_pages=24, look_ahead=1, buckets=(1, 2, 4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)


def make(limits: Limits, graphs: bool) -> Engine:
    return twinfer.fast.Engine.from_pretrained(MICRO, limits=limits, dtype="float32", device=DEVICE, graphs=graphs, tokenizer=False)


def test_the_bits_of_a_token_do_not_depend_on_the_schedule() -> None:
    findings = list(Law2(make, LIMITS, PROMPTS, num_tokens=3, batches=(4,), chunks=(8,)).run())
    assert [f.schedule for f in findings if not f.reached or not f.num_positions] == []
    assert {f.schedule: f.different for f in findings if f.different} == {}
    names = " | ".join(f.schedule for f in findings)
    for wanted in ("alone", "without graphs", "batch of 4", "chunks of 8", "mixed", "prefix hits", "preemption"):
        assert wanted in names


def test_a_product_that_is_split_by_the_size_of_the_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums over halves of K in steps of more than 16 tokens, one sum in others: right to 1e-6, and found where the prompt is cut into chunks."""
    def by_step(self: Products, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if len(x) <= 16:
            matmul(x, weight, out, bias)
        else:
            in_halves(x, weight, out, bias)

    monkeypatch.setattr(Products, "linear", by_step)
    found: list[Finding] = []
    for finding in Law2(make, LIMITS, PROMPTS[:1], num_tokens=1, batches=(), chunks=(8,)).run():
        found.append(finding)
        if finding.different:
            break
    assert [f.schedule for f in found] == ["alone", "alone, without graphs", "chunks of 8"]
    assert len(found[-1].different) > 10


def test_logits_that_tokens_are_drawn_from_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for every token that a tap is shown, in other bits where the tokens of a step are sampled."""
    logits = Sampling._logits

    def drawn_in_halves(self: Sampling, hidden: torch.Tensor, at: torch.Tensor, part: slice | None) -> torch.Tensor:
        out = logits(self, hidden, at, part)
        rows = hidden[part] if part is not None else hidden[at.long()]
        in_halves(rows, self._model.weights.head, out)
        return out

    monkeypatch.setattr(Sampling, "_logits", drawn_in_halves)
    finding = next(Law2(make, LIMITS, PROMPTS[:1], num_tokens=1, batches=(), chunks=()).run())
    assert finding.different == [(0, len(PROMPTS[0]) - 1)]


def test_a_gate_that_sees_no_sampled_logits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_take_sampled", lambda *shown: None)
    with pytest.raises(RuntimeError, match="drew tokens from"):
        next(Law2(make, LIMITS, PROMPTS[1:], num_tokens=1, batches=(), chunks=()).run())


def in_halves(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """The product as two sums over halves of K: right to 1e-6, in other bits."""
    half, rest = x.shape[1] // 2, torch.empty_like(out)
    matmul(x[:, :half].contiguous(), weight[:, :half].contiguous(), out, bias)
    matmul(x[:, half:].contiguous(), weight[:, half:].contiguous(), rest)
    out += rest
