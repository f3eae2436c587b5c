"""What stands in the padding of a captured step: fill values and nothing that a longer step before it left; and what warming up leaves in the cache.

A graph computes its bucket's rows, whoever is there. Positions of an earlier batch, a draw that lands in a live slot and keys that a warm-up run writes
into page 0 of the pool are faults of public engines (docs/known_faults.md). Where padding writes keys is test_buffers.py's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE
from tests.fast.test_staging import CONFIG, H200, limits
from tests.invariants.plans import i32, plan
from twinfer.engine.engine import Engine
from twinfer.engine.scheduler import Scheduler
from twinfer.fast import inputs
from twinfer.fast.buffers import Buffers
from twinfer.fast.graphs import DRAW, GREEDY
from twinfer.fast.inputs import PADDING_ROW, StepInputs
from twinfer.fast.shape import Shapes
from twinfer.golden import MICRO
from twinfer.invariants.ledger import Ledger
from twinfer.plan import StepPlan
from twinfer.request import Request
from twinfer.sampling import SamplingParams

PLAIN = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_padding_holds_its_fill_values_after_a_longer_step(look_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host alone: a batch that shrinks from 40 rows of long contexts to one, so that every staging set has held more than it does now."""
    monkeypatch.setattr(inputs, "update_page_table", lambda *arguments: None)
    within = limits(16, 40, 600, 300, look_ahead)
    buffers = Buffers(CONFIG, Ledger(within, CONFIG, "bfloat16"), torch.device("cpu"), within.look_ahead + 1)
    staging, shapes = StepInputs(CONFIG, within, buffers, H200), Shapes(within)
    scheduler = Scheduler(within, partial(Ledger(within, CONFIG, "bfloat16").host, owner="engine"))
    random = np.random.default_rng(look_ahead)
    for i in range(40):
        prompt = tuple(random.integers(1, 64, int(random.integers(100, 500))).tolist())
        scheduler.add(Request(prompt, SamplingParams(max_tokens=i + 1, temperature=0.0)), i, 0, 0, frozenset())
    padded = decoding = 0
    while scheduler.has_work:
        made = scheduler.plan()
        assert made is not None
        scheduler.delivered(made)
        shape = shapes.of(made)
        staged = staging.stage(made, shape)
        host = buffers.staging[staged.set]
        extra = slice(made.num_tokens, shape.num_tokens)
        for name in ("token_ids", "positions", "write_slots"):
            assert not host[name][extra].any(), f"{name} of {made.num_tokens} tokens padded to {shape.num_tokens}: {host[name][extra]}"
        padded += shape.num_tokens > made.num_tokens
        if shape.decode:
            assert (host["sampled_row"][made.num_rows : shape.num_tokens] == PADDING_ROW).all()
            decoding += shape.num_tokens > made.num_rows
        scheduler.commit(made, np.ones(int(made.num_samples.sum()), np.int32))
    assert padded > 20
    assert decoding > 10


def test_a_chunk_of_one_token_is_no_decode_row() -> None:
    """The kind of a row is whether it samples, not how long it is: the graph of a decode step would draw a token in the midst of a prompt."""
    within = limits(16, 4, 64, 64, 0)
    columns = {"length": i32(1, 1, 1), "start": i32(7, 0, 9), "tokens": i32(5, 6, 7), "num_scored": i32(0, 0, 0), "targets": i32()}
    assert Shapes(within).of(plan(**columns, num_samples=i32(1, 1, 1))).decode
    for samples in ((0, 1, 1), (1, 1, 0), (0, 0, 0)):
        assert not Shapes(within).of(plan(**columns, num_samples=i32(*samples))).decode


def opened(**values: int) -> Engine:
    made = {"max_step_tokens": 4, "max_chunk_tokens": 4, "max_context": 32, "page_size": 16, "num_pages": 8, **values}
    return twinfer.fast.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits=made, audit="full", graphs=True)


def test_warming_up_writes_no_page_that_a_request_may_get() -> None:
    """Every captured step once, as capture runs it: of the cache, the first slot of the padding page is written, and nothing else."""
    engine = opened(max_batch=2)
    executor: Any = engine.executor
    if DEVICE == "cpu":  # where there is a GPU, making the executor has run them
        graphs, columns = executor._graphs, executor._inputs.columns()
        with torch.inference_mode():
            for shape in executor._shapes.all():
                for stages in (None, GREEDY, DRAW) if shape.decode else (None,):
                    graphs._step(shape, graphs._inputs.graph_launches(shape), columns, stages)
    for name in ("kv_keys", "kv_values"):
        cache = executor.buffers()[name].cpu()
        assert cache[0, 0, 0].isfinite().all(), f"{name}: no step was run"
        assert cache[:, 1:].isnan().all(), f"{name}: a page of the pool was written"
        assert cache[:, 0, 1:].isnan().all(), f"{name}: a second slot of the padding page was written"
    engine.close()


def test_a_padding_row_draws_into_no_slot() -> None:
    """Three rows are padded to four while a fourth request, whose penalties need the host, is left out: the token fed back to it stays what it is, and
    those of the three are what they drew."""
    engine = opened(max_batch=4, look_ahead=1)
    executor: Any = engine.executor
    parked = engine.add([9, 8, 7, 6], replace(PLAIN, presence_penalty=0.5, max_tokens=3))  # it takes slot 0, where a stray row would point
    for i in range(3):
        engine.add([10 + i], PLAIN)
    launch, checked, feed = executor.launch, [], executor.buffers()["token_feed"]

    def watched(made: StepPlan) -> None:
        before = feed.clone()
        launch(made)
        others = np.setdiff1d(np.arange(4), made.slot)
        assert torch.equal(feed[others], before[others]), f"step {made.step}: slots {others} have no row, their tokens changed"
        drawn = executor._buffers.tensors["sampled_tokens"][: int(made.num_samples.sum())]
        assert torch.equal(feed[made.slot[made.num_samples > 0]], drawn), f"step {made.step}: another row's draw is fed back"
        if made.num_rows == 3 and executor._flying[-1].staged.shape.num_tokens == 4:
            checked.append(others.tolist())

    executor.launch = watched
    while engine.has_work:
        assert not any(event.error for event in engine.step())
    assert checked.count([0]) >= 1, f"no step with three rows had the fourth parked: {checked}"
    assert parked == 0
    engine.close()
