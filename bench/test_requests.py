"""The engines on the same inputs, by request: a few of different lengths, from prompt to last token. Run with --benchmark-only; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.bench.conftest import ENGINES, MakePeer, Prompts, synchronised
from twinfer.bench.load import closed_loop
from twinfer.bench.workloads import Item

REQUESTS = ((40, 24), (128, 16), (77, 32), (200, 8))  # prompt and output tokens


@pytest.mark.parametrize("engine", ENGINES)
def test_generate(benchmark: Any, make_peer: MakePeer, prompts: Prompts, engine: str) -> None:
    benchmark.group = f"{len(REQUESTS)} requests, prompt to last token"
    items = [Item(prompts(1, prompt)[0], output) for prompt, output in REQUESTS]
    peer = make_peer(engine, len(items), max(prompt + output for prompt, output in REQUESTS))

    def run() -> None:
        assert not closed_loop(peer, items, len(items)).errors
        synchronised()

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
