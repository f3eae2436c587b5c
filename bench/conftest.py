"""What the comparisons share: the model on every side, its engines, and the gates that a pair must pass before it is timed. No timing here.

On a CPU: the bundled model in fp32, reference and transformers. TEST_DEVICE=cuda: the shape qwen3-0.6b (or BENCH_MODEL) in bf16, and the fast engine
too; the gates are passed in fp32 there as well, since bf16's noise would hide a fault.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from twinfer.bench.gate import Equality, compare_engines, compare_with_transformers
from twinfer.bench.load import Peer
from twinfer.bench.models import BUNDLED, Model, fast_engine, load_model, reference_engine, transformers_model
from twinfer.bench.peers import EnginePeer, TransformersPeer
from twinfer.bench.record import device_slug
from twinfer.engine.engine import Engine
from twinfer.limits import Limits, ceil_div

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
MODEL = os.environ.get("BENCH_MODEL", str(BUNDLED) if DEVICE == "cpu" else "qwen3-0.6b")
DTYPE = "float32" if DEVICE == "cpu" else "bfloat16"
# Triton's interpreter is for tests of what is computed: how long it takes says nothing.
ENGINES = ("reference", "transformers") if DEVICE == "cpu" else ("fast", "transformers", "reference")
Prompts = Callable[[int, int], list[tuple[int, ...]]]
MakePeer = Callable[[str, int, int], Peer]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, and with it every figure hangs on what else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if DEVICE == "cpu" else before)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def timed() -> Model:
    """The tensors that every side computes with."""
    return load_model(MODEL, DTYPE, DEVICE)


@pytest.fixture(scope="session")
def prompts(timed: Model) -> Prompts:
    """`prompts(count, length)`: random token ids, the same ones for the same numbers."""

    def make(count: int, length: int) -> list[tuple[int, ...]]:
        rng = random.Random(f"{count}x{length}")
        return [tuple(rng.randrange(timed.config.vocab_size) for _ in range(length)) for _ in range(count)]

    return make


def engine_for(model: Model, kind: str, batch: int, context: int) -> Engine:
    """One of our engines for `batch` requests of `context` tokens at once, its prefix cache off, so that every round computes the same."""
    page_size, look_ahead, step_tokens = (64, 1, min(batch * context, 8192)) if kind == "fast" else (16, 0, batch * context)
    limits = Limits(
        max_batch=batch,
        max_step_tokens=max(batch, step_tokens),
        max_chunk_tokens=min(context, step_tokens),
        warmup_tokens=1,
        max_context=context,
        max_step_context=batch * context,
        max_logit_tokens=256 if kind == "fast" else max(64, batch),
        page_size=page_size,
        num_pages=batch * ceil_div(context + look_ahead, page_size),
        look_ahead=look_ahead,
        buckets=(batch,),
    )
    return (fast_engine if kind == "fast" else reference_engine)(model, limits, prefix_cache=False)


@dataclass(slots=True)
class Gates:
    """The pairs that have passed their equality gate in this session, each compared once, when first asked for."""

    prompts: Prompts
    passed: dict[str, Equality] = field(default_factory=dict)

    def check(self, engine: str) -> Equality:
        """The gate of an engine's pair; of the reference, which is the other side of both, that against transformers. Raises GateFailed."""
        other = "transformers" if engine == "reference" else engine
        if other not in self.passed:
            self.passed[other] = self._compare(other).check()
        return self.passed[other]

    def _compare(self, other: str) -> Equality:
        model = load_model(MODEL, "float32", DEVICE)
        given = [*self.prompts(1, 128), *self.prompts(1, 512), *self.prompts(8, 128)]
        with engine_for(model, "reference", len(given), 768) as reference:
            if other == "transformers":
                return compare_with_transformers(reference, transformers_model(model), given, max_tokens=8)
            with engine_for(model, other, len(given), 768) as engine:
                return compare_engines(reference, engine, given, max_tokens=8)


@pytest.fixture(scope="session")
def gates(prompts: Prompts) -> Gates:
    return Gates(prompts)


@pytest.fixture(scope="session")
def transformers_timed(timed: Model) -> Any:
    """transformers' model of the tensors that are timed."""
    return transformers_model(timed)


@pytest.fixture
def make_peer(benchmark: Any, timed: Model, gates: Gates, request: pytest.FixtureRequest) -> Iterator[MakePeer]:
    """`make_peer(engine, batch, context)`: something to drive, once the engine's pair has passed its gate; the gate's figure goes with the timing's."""
    made: list[Engine] = []

    def make(kind: str, batch: int, context: int) -> Peer:
        equality = gates.check(kind)
        benchmark.extra_info.update(
            model=timed.name, device=device_slug(DEVICE), dtype=DTYPE, gate=equality.pair, max_difference_nat=equality.max_nat, positions=equality.num_positions
        )
        if kind == "transformers":
            return TransformersPeer(request.getfixturevalue("transformers_timed"), batch)
        made.append(engine_for(timed, kind, batch, context))
        return EnginePeer(made[-1])

    yield make
    for engine in made:
        engine.close()
    made.clear()
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()


def synchronised() -> None:
    """Waits for the GPU, where there is one."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
