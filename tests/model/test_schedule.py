"""Whatever the cut into steps and whoever else is in them, a request gets the logits of its solo run: 1e-9 nat in float64, 1e-4 in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.engine.checkpoint import Checkpoint, random_weights
from twinfer.reference.qwen3 import Qwen3

from . import tiny
from .driver import Driver, Sequence, run_alone

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@pytest.fixture(scope="module", params=["checkpoint", "windowed"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=TOLERANCE)
def model_and_limit(request: pytest.FixtureRequest, path: Path) -> tuple[Qwen3, float]:
    found = Checkpoint.open(path)
    return Qwen3(found.config, found.weights(tiny.DTYPES[request.param])), TOLERANCE[request.param]


def draw_tokens(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(97) for i in range(count)]


@settings(max_examples=examples(15), deadline=None, derandomize=repeatable())
@given(data=st.data())
def test_any_cut_into_chunks(model_and_limit: tuple[Qwen3, float], data: st.DataObject) -> None:
    model, limit = model_and_limit
    count = data.draw(st.integers(1, 60), label="tokens")
    page_size = data.draw(st.sampled_from([1, 3, 16]), label="page_size")
    tokens, pieces = draw_tokens(count, count), []
    while sum(pieces) < count:
        pieces.append(data.draw(st.integers(1, count - sum(pieces)), label="piece"))
    assert tiny.nats(run_alone(model, tokens, pieces, page_size), run_alone(model, tokens, [count], 16)) <= limit


@settings(max_examples=examples(15), deadline=None, derandomize=repeatable())
@given(data=st.data())
def test_any_company_in_the_step(model_and_limit: tuple[Qwen3, float], data: st.DataObject) -> None:
    """Two or three requests advance by different lengths in shared steps, prefill beside decode, rows in any order."""
    model, limit = model_and_limit
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=3), label="lengths")
    driver = Driver(model, data.draw(st.sampled_from([1, 3, 16]), label="page_size"), num_pages=140, seed=len(lengths))
    requests = [(Sequence(), draw_tokens(i, length), []) for i, length in enumerate(lengths)]
    while pending := [request for request in requests if request[0].context < len(request[1])]:
        chosen = data.draw(st.permutations(pending), label="rows")[: data.draw(st.integers(1, len(pending)), label="how many")]
        rows = []
        for sequence, tokens, _ in chosen:
            left = len(tokens) - sequence.context
            length = data.draw(st.sampled_from(sorted({1, min(2, left), min(17, left), left})), label="length")
            rows.append((sequence, tokens[sequence.context : sequence.context + length]))
        for (_, _, got), logits in zip(chosen, driver.step(rows), strict=True):
            got.append(logits)
    for _, tokens, got in requests:
        assert tiny.nats(torch.cat(got), run_alone(model, tokens, [len(tokens)])) <= limit


def test_shared_pages(model_and_limit: tuple[Qwen3, float]) -> None:
    """Two requests that list the same physical pages for a common start, each then going its own way in one step."""
    model, limit = model_and_limit
    driver, page_size = Driver(model, 4), 4
    common, tails = draw_tokens(1, 3 * page_size), [draw_tokens(2, 6), draw_tokens(3, 9)]
    first = Sequence()
    driver.step([(first, common)])
    second = Sequence(first.context, list(first.pages))
    logits = driver.step([(first, tails[0]), (second, tails[1])])
    assert first.pages[:3] == second.pages[:3]
    assert not set(first.pages[3:]) & set(second.pages[3:])
    for tail, got in zip(tails, logits, strict=True):
        assert tiny.nats(got, run_alone(model, common + tail, [len(common) + len(tail)])[len(common) :]) <= limit


def test_page_list_shorter_than_the_context(model_and_limit: tuple[Qwen3, float]) -> None:
    driver = Driver(model_and_limit[0], 4)
    with pytest.raises(ValueError, match=r"context of 9 tokens .* the 2 pages of 4 tokens"):
        driver.cache.gather(0, torch.tensor([3, 1]), 9)


def test_random_weights_run(checkpoint: Path) -> None:
    """Made-up weights depend on seed and name only, have one object for a tied head, and give finite logits of a sane size."""
    config = Checkpoint.open(checkpoint).config
    weights = random_weights(config, 5, torch.float32)
    again, other = random_weights(config, 5, torch.bfloat16), random_weights(config, 6, torch.float32)
    for name, tensor in weights.items():
        assert torch.equal(tensor.to(torch.bfloat16), again[name])
        assert not torch.equal(tensor, other[name])
    assert abs(float(weights["model.norm.weight"].mean()) - 1) < 0.1
    logits = run_alone(Qwen3(config, weights), draw_tokens(0, 40), [40])
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 5
