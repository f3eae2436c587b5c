"""A prompt computed in pieces is the prompt computed whole, with the state carried between them; neighbours in a step and a slot's past change nothing.

In float64, where the bits of a product with fewer rows stay far below 1e-10. Nothing here knows transformers.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
import torch

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import random_weights
from twinfer.reference.hybrid import Hybrid

from .driver import Driver, Sequence, run_alone
from .shapes import HYBRID, KINDS, NEW

GATE = 1e-10  # logits near 8; found: at most 2.7e-14
TOKENS = torch.randint(0, 97, (130,), generator=torch.Generator().manual_seed(4)).tolist()
EDGES = (1, 2, 3, 4, 63, 64, 65, 66, 127, 128, 129)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Hybrid:
    config = KINDS[name].config(**json.loads(json.dumps(KINDS[name].shape)))
    ours = ModelConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    return Hybrid(ours, random_weights(ours, 11, dtype))


MODELS = {name: model_of(name) for name in NEW}
WHOLE = {name: run_alone(model, TOKENS, [len(TOKENS)]) for name, model in MODELS.items()}


def same(found: torch.Tensor, name: str) -> None:
    assert float((found - WHOLE[name][: len(found)]).abs().max()) <= GATE


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", NEW)
def test_two_pieces(name: str, edge: int) -> None:
    same(run_alone(MODELS[name], TOKENS, [edge, len(TOKENS) - edge]), name)


@pytest.mark.parametrize("name", NEW)
def test_token_by_token(name: str) -> None:
    same(run_alone(MODELS[name], TOKENS, [1] * len(TOKENS), page_size=3), name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NEW)
def test_many_pieces(name: str, seed: int) -> None:
    """Cuts drawn from the edges and from anywhere."""
    draw = random.Random(f"{name} {seed}")
    cuts = sorted({0, len(TOKENS), *draw.sample(EDGES, 4), *draw.sample(range(1, len(TOKENS)), 4)})
    pieces = [end - start for start, end in pairwise(cuts)]
    same(run_alone(MODELS[name], TOKENS, pieces, page_size=draw.choice((1, 3, 16))), name)


@pytest.mark.parametrize("name", NEW)
def test_rows_of_one_step_know_nothing_of_each_other(name: str) -> None:
    """Three requests in mixed steps: one decodes while others prefill; their states lie in slots in another order than their rows."""
    driver = Driver(MODELS[name], page_size=4, num_pages=120)
    requests = [Sequence(slot=slot) for slot in (5, 0, 2)]
    tokens = [TOKENS, TOKENS[:40], TOKENS[:65]]
    plans = [[(0, 64), (1, 1)], [(2, 3), (0, 1)], [(1, 2), (0, 1), (2, 61)], [(2, 1), (1, 37)], [(0, 64)]]
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for plan in plans:
        rows = [(requests[i], tokens[i][requests[i].context :][:length]) for i, length in plan]
        for (i, _), logits in zip(plan, driver.step(rows), strict=True):
            found[i].append(logits)
    for i, sequence in enumerate(requests):
        assert sequence.context == len(tokens[i])
        same(torch.cat(found[i]), name)


@pytest.mark.parametrize("first", [1, 2, 3, 20])
@pytest.mark.parametrize("name", HYBRID)
def test_a_slot_forgets_whose_it_was(name: str, first: int) -> None:
    """A new request in a used slot starts from nothing, also when its first piece is one token and looks like decode."""
    driver = Driver(MODELS[name])
    driver.step([(Sequence(slot=1), list(reversed(TOKENS[:50])))])
    sequence = Sequence(slot=1)
    found = driver.step([(sequence, TOKENS[:first])]) + driver.step([(sequence, TOKENS[first:30])])
    same(torch.cat(found), name)


@pytest.mark.parametrize("edge", [1, 2, 3, 64])
@pytest.mark.parametrize("name", HYBRID)
def test_a_copied_state_and_its_pages_are_a_snapshot(name: str, edge: int) -> None:
    """What a prefix cache will do: two requests go on from copies of one state, over the same pages, each as if it were alone."""
    driver = Driver(MODELS[name], page_size=1, num_pages=120)
    parent = Sequence(slot=0)
    driver.step([(parent, TOKENS[:edge])])
    children = [Sequence(parent.context, list(parent.pages), slot) for slot in (4, 6)]
    for tensors in (driver.states.history, driver.states.recurrent):
        for tensor in tensors:
            tensor[[4, 6]] = tensor[[0, 0]]
    other = list(reversed(TOKENS))[:20]
    one, two = driver.step([(children[0], TOKENS[edge : edge + 30]), (children[1], other)])
    assert float((one - WHOLE[name][edge : edge + 30]).abs().max()) <= GATE
    assert float((two - run_alone(MODELS[name], TOKENS[:edge] + other, [edge + 20])[edge:]).abs().max()) <= GATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", HYBRID)
def test_the_state_is_wide(name: str, dtype: torch.dtype) -> None:
    driver = Driver(model_of(name, dtype))
    driver.step([(Sequence(), TOKENS[:5])])
    assert {tensor.dtype for tensor in driver.states.recurrent} == {torch.float32}
    assert {tensor.dtype for tensor in driver.states.history} == {dtype}
    assert all(tensor[3].isfinite().all() and tensor[4].isnan().all() for tensor in (*driver.states.recurrent, *driver.states.history))
