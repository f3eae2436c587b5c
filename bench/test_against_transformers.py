"""reference / transformers on the same inputs: prefill, one decode step, whole requests. Run with --benchmark-only; no time is asserted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from twinfer.bench.conftest import MakeEngine
from twinfer.bench.gate import Equality
from twinfer.bench.load import closed_loop
from twinfer.bench.peers import EnginePeer, TransformersPeer
from twinfer.bench.workloads import Item
from twinfer.sampling import SamplingParams

Prompts = Callable[[int, int], list[tuple[int, ...]]]
PREFILLS = (128, 512)
BATCHES = (1, 8)
DECODE_CONTEXT = 128  # tokens in cache when the timing of decode steps starts; each round adds one, on both sides
ROUNDS = 20


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("length", PREFILLS)
def test_prefill_reference(benchmark: Any, equality: Equality, make_engine: MakeEngine, prompts: Prompts, length: int) -> None:
    benchmark.group = f"prefill {length} tokens"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    engine, prompt = make_engine(1, length + 1), prompts(1, length)[0]

    def run() -> None:
        engine.add(prompt, greedy(1))
        assert engine.step()[0].terminal

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)


@pytest.mark.parametrize("length", PREFILLS)
def test_prefill_transformers(benchmark: Any, equality: Equality, theirs: Any, prompts: Prompts, length: int) -> None:
    benchmark.group = f"prefill {length} tokens"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    ids = torch.tensor(prompts(1, length))

    def run() -> int:
        with torch.inference_mode():
            return int(theirs(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)


@pytest.mark.parametrize("batch", BATCHES)
def test_decode_step_reference(benchmark: Any, equality: Equality, make_engine: MakeEngine, prompts: Prompts, batch: int) -> None:
    benchmark.group = f"decode step, batch {batch}"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    room = 4 * ROUNDS
    engine = make_engine(batch, DECODE_CONTEXT + room)
    for prompt in prompts(batch, DECODE_CONTEXT):
        engine.add(prompt, greedy(room))
    assert len(engine.step()) == batch, "one step prefills every prompt"
    benchmark.pedantic(engine.step, rounds=ROUNDS, warmup_rounds=2)
    assert engine.scheduler.num_running == batch, "all rows decoded until the end"


@pytest.mark.parametrize("batch", BATCHES)
def test_decode_step_transformers(benchmark: Any, equality: Equality, theirs: Any, prompts: Prompts, batch: int) -> None:
    benchmark.group = f"decode step, batch {batch}"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    peer = TransformersPeer(theirs, batch)
    for key, prompt in enumerate(prompts(batch, DECODE_CONTEXT)):
        peer.submit(key, prompt, 4 * ROUNDS)
    assert len(peer.poll()) == batch
    news = benchmark.pedantic(peer.poll, rounds=ROUNDS, warmup_rounds=2)
    assert len(news) == batch, "all rows decoded until the end"


REQUESTS = ((40, 24), (128, 16), (77, 32), (200, 8))  # prompt and output tokens


def requests(prompts: Prompts) -> list[Item]:
    return [Item(prompts(1, prompt)[0], output) for prompt, output in REQUESTS]


def test_generate_reference(benchmark: Any, equality: Equality, make_engine: MakeEngine, prompts: Prompts) -> None:
    benchmark.group = f"{len(REQUESTS)} requests, prompt to last token"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    engine, items = make_engine(len(REQUESTS), max(p + o for p, o in REQUESTS)), requests(prompts)
    outcome = benchmark.pedantic(lambda: closed_loop(EnginePeer(engine), items, len(items)), rounds=5, warmup_rounds=1)
    assert not outcome.errors


def test_generate_transformers(benchmark: Any, equality: Equality, theirs: Any, prompts: Prompts) -> None:
    benchmark.group = f"{len(REQUESTS)} requests, prompt to last token"
    benchmark.extra_info["max_difference_nat"] = equality.max_nat
    items = requests(prompts)
    outcome = benchmark.pedantic(lambda: closed_loop(TransformersPeer(theirs, len(items)), items, len(items)), rounds=5, warmup_rounds=1)
    assert not outcome.errors
