"""The engines on the same inputs, by step: one prefill, one decode step of a batch. Run with --benchmark-only; no time is asserted.

Each round ends with tokens on the host, so it ends after the device's work. The fast engine serves with a step of look-ahead: its round launches a step
and ends with the tokens of the one before, so rounds add up to what a run of steps takes.
"""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.bench.conftest import DEVICE, ENGINES, MakePeer, Prompts, synchronised
from twinfer.bench.load import closed_loop
from twinfer.bench.workloads import Item

PREFILLS = (128, 512) if DEVICE == "cpu" else (512, 2048)
BATCHES = (1, 8) if DEVICE == "cpu" else (1, 8, 64, 256)
DECODE_CONTEXT = 128  # tokens in cache when the timing of decode steps starts; each round adds one, on every side
ROUNDS = 20


@pytest.mark.parametrize("length", PREFILLS)
@pytest.mark.parametrize("engine", ENGINES)
def test_prefill(benchmark: Any, make_peer: MakePeer, prompts: Prompts, engine: str, length: int) -> None:
    benchmark.group = f"prefill {length} tokens"
    peer, items = make_peer(engine, 1, length + 1), [Item(prompts(1, length)[0], 1)]

    def run() -> None:
        assert not closed_loop(peer, items, 1).errors
        synchronised()

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("engine", ENGINES)
def test_decode_step(benchmark: Any, make_peer: MakePeer, prompts: Prompts, engine: str, batch: int) -> None:
    benchmark.group = f"decode step, batch {batch}"
    rounds = 5 if engine == "reference" and batch > 8 else ROUNDS  # it computes attention row by row
    room = rounds + 20
    peer = make_peer(engine, batch, DECODE_CONTEXT + room)
    for key, prompt in enumerate(prompts(batch, DECODE_CONTEXT)):
        peer.submit(key, prompt, room)
    decoding: set[int] = set()
    while len(decoding) < batch:
        decoding |= {news.key for news in peer.poll()}
    synchronised()
    news = benchmark.pedantic(peer.poll, rounds=rounds, warmup_rounds=3)
    assert len(news) == batch, "all rows decoded until the end"
    assert not any(item.error for item in news)
