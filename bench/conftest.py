"""What the comparisons share: the bundled model in fp32 on both sides, and the gate that a pair must pass before it is timed. No timing here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from twinfer.bench.gate import Equality, compare_with_transformers
from twinfer.bench.models import BUNDLED, Model, load_model, reference_engine, transformers_model
from twinfer.engine.engine import Engine
from twinfer.limits import Limits, ceil_div

MakeEngine = Callable[[int, int], Engine]
PAGE_SIZE = 16


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, and with it every figure hangs on what else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled() -> Model:
    """The bundled checkpoint's tensors in fp32, shared by both engines."""
    return load_model(str(BUNDLED), "float32")


@pytest.fixture(scope="session")
def prompts(bundled: Model) -> Callable[[int, int], list[tuple[int, ...]]]:
    """`prompts(count, length)`: random token ids, the same ones for the same numbers."""

    def make(count: int, length: int) -> list[tuple[int, ...]]:
        rng = random.Random(f"{count}x{length}")
        return [tuple(rng.randrange(bundled.config.vocab_size) for _ in range(length)) for _ in range(count)]

    return make


@pytest.fixture
def make_engine(bundled: Model) -> Iterator[MakeEngine]:
    """`make_engine(batch, context)`: a reference engine whose prefix cache is off, so that every round computes the same."""
    made: list[Engine] = []

    def make(batch: int, context: int) -> Engine:
        made.append(engine_for(bundled, batch, context))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def engine_for(model: Model, batch: int, context: int) -> Engine:
    """A reference engine for `batch` requests of `context` tokens at once."""
    limits = Limits(
        max_batch=batch,
        max_step_tokens=batch * context,
        max_chunk_tokens=context,
        warmup_tokens=1,
        max_context=context,
        max_step_context=batch * context,
        max_logit_tokens=max(64, batch),
        page_size=PAGE_SIZE,
        num_pages=batch * ceil_div(context, PAGE_SIZE),
    )
    return reference_engine(model, limits, prefix_cache=False)


@pytest.fixture(scope="session")
def ungated_transformers(bundled: Model) -> Any:
    """transformers' model, before anybody knows that it agrees with ours: comparisons take `theirs` instead."""
    return transformers_model(bundled)


@pytest.fixture(scope="session")
def equality(bundled: Model, ungated_transformers: Any, prompts: Callable[[int, int], list[tuple[int, ...]]]) -> Equality:
    """The gate of reference / transformers, on the prompts that are timed. Where it fails, every comparison of the pair fails with it."""
    given = [*prompts(1, 128), *prompts(1, 512), *prompts(8, 128)]
    return compare_with_transformers(engine_for(bundled, len(given), 768), ungated_transformers, given, max_tokens=8).check()


@pytest.fixture
def theirs(equality: Equality, ungated_transformers: Any) -> Any:
    """transformers' model, once the gate has passed."""
    assert equality.num_positions
    return ungated_transformers
