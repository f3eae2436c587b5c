"""The first outage on both engines: green with our bound, refused by name and numbers with the old one, and a burst that never shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE
from tests.outages import shared_prefixes
from tests.outages.replay import ENGINES, Make, make_reference, told_numbers
from tests.outages.shared_prefixes import FULL, TINY, TINY_FAST, Traffic, burst, check, staggered
from twinfer.bench.shapes import SHAPES
from twinfer.engine.engine import Engine
from twinfer.invariants.faults.buffers import POOL_LIST
from twinfer.invariants.faults.catalogue import CATALOGUE
from twinfer.invariants.faults.switch import sized
from twinfer.limits import Limits

TRAFFIC = {"reference": TINY, "fast": TINY_FAST}
(OLD_BOUND,) = (fault for fault in CATALOGUE if fault.name == "page list by the pool")


@pytest.fixture(params=list(ENGINES))
def case(request: pytest.FixtureRequest) -> tuple[Traffic, Make]:
    return TRAFFIC[request.param], ENGINES[request.param]


def test_all_complete_with_the_right_bound(case: tuple[Traffic, Make]) -> None:
    check(*case)


def test_the_old_bound_is_refused_by_its_numbers(case: tuple[Traffic, Make]) -> None:
    """The auditor refuses the step before it is launched: rows that go beyond the list end with an error that tells both numbers, the others go on."""
    traffic, make = case
    with OLD_BOUND.on():
        replay = staggered(traffic, make)
        errors = replay.errors()
        assert errors, "the list never overflowed"
        for error in errors:
            demand, capacity = told_numbers(error, "page_indices")
            assert capacity == traffic.old_capacity < demand
        assert len(errors) < traffic.num_requests, "rows that fit were refused too"
        replay.check_engine_is_well()
        replay.engine.close()


def test_without_an_audit_the_executor_says_so() -> None:
    """As it was: nothing checks the plan, and the list is too short when it is filled. The step fails and says by how much; the engine goes on."""
    with sized("page_indices", capacity=POOL_LIST, audited=False)():
        replay = staggered(TINY, make_reference)
        errors = replay.errors()
        assert errors
        for error in errors:
            demand, capacity = told_numbers(error, "page_indices")
            assert capacity == TINY.old_capacity < demand
        replay.check_engine_is_well()


def test_a_burst_never_shows_it() -> None:
    """The control, with the old bound: pages are found once they are sealed, and of one burst none is when its requests are admitted."""
    with OLD_BOUND.on():
        replay = burst(TINY, make_reference)
        assert len(replay.events) >= 2
        replay.check_all_completed()
        assert replay.references() <= TINY.limits.num_pages, "a burst lists no more than the pool holds"
        assert replay.engine.scheduler.num_prefix_hits == 0
        with pytest.raises(AssertionError, match="the old list held"):  # the replay's own check notices traffic that shows nothing
            shared_prefixes.check_in_band(replay, TINY)
        replay.check_engine_is_well()
        replay.engine.close()


@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE == "cpu", reason="full size: needs a GPU and TEST_DEVICE=cuda")
def test_full_size(tmp_path: Path) -> None:
    """256 requests over a warm prompt of 3000 tokens, shape of Qwen3-0.6B with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))

    def make(limits: Limits) -> Engine:
        return twinfer.fast.Engine.from_pretrained(tmp_path, random_seed=1, dtype="bfloat16", device=DEVICE, limits=limits, tokenizer=False)

    check(FULL, make)
    with OLD_BOUND.on():
        replay = staggered(FULL, make)
        assert all(told_numbers(error, "page_indices")[1] == FULL.old_capacity for error in replay.errors())
        assert replay.errors()
        replay.check_engine_is_well()
        replay.engine.close()
