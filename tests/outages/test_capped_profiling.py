"""The second outage on both engines: green with our bound, refused by name and numbers with the old one, and prompts one by one that never show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import twinfer.fast
import twinfer.reference
from tests.fast.pair import DEVICE
from tests.outages.capped_profiling import FULL, TINY, Traffic, check, check_in_band, one_by_one, together
from tests.outages.replay import ENGINES, Make, make_reference, told_numbers
from twinfer.bench.shapes import SHAPES, shape_source
from twinfer.engine.engine import Engine
from twinfer.fast.shape import EAGER
from twinfer.golden.hybrid import write
from twinfer.invariants.faults.buffers import WARMUP_SIZE
from twinfer.invariants.faults.catalogue import CATALOGUE
from twinfer.invariants.faults.switch import sized
from twinfer.limits import Limits, ceil_div

TINY_STATES = replace(TINY, page_size=64)  # pages and chunks of states share a grid
(OLD_BOUND,) = (fault for fault in CATALOGUE if fault.name == "tokens by the warm-up forward")


@pytest.fixture(params=list(ENGINES))
def make(request: pytest.FixtureRequest) -> Make:
    return ENGINES[request.param]


def test_a_step_above_the_cap_runs_with_the_right_bound(make: Make) -> None:
    check(TINY, make)


def test_the_old_bound_is_refused_by_its_numbers(make: Make) -> None:
    """The auditor refuses the step before it is launched: the prompt that passes the cap ends with an error that tells both numbers, the rest goes on."""
    with OLD_BOUND.on():
        replay = together(TINY, make)
        (error,) = replay.errors()
        assert told_numbers(error, "token_ids") == (TINY.step_tokens, TINY.cap)
        replay.check_engine_is_well()
        replay.engine.close()


def test_without_an_audit_the_executor_says_so(make: Make) -> None:
    """As it was: nothing checks the plan, and the buffer is too short when it is filled. No silent slice: the step fails and says by how much."""
    with sized("token_ids", capacity=WARMUP_SIZE, audited=False)():
        replay = together(TINY, make)
        assert len(replay.errors()) == TINY.num_decoding + len(TINY.prompts), "every row of that step ends"
        for error in replay.errors():
            assert told_numbers(error, "token_ids") == (TINY.step_tokens, TINY.cap)
        check_in_band(replay, TINY)
        replay.check_engine_is_well()
        replay.engine.close()


def test_prompts_one_by_one_never_show_it() -> None:
    """The control, with the old bound: no step passes the cap, though the scheduler might issue twice as much."""
    with OLD_BOUND.on():
        replay = one_by_one(TINY, make_reference)
        replay.check_all_completed()
        assert max(plan.num_tokens for plan in replay.plans) <= TINY.cap
        with pytest.raises(AssertionError, match="steps of"):  # the replay's own check notices traffic that shows nothing
            check_in_band(replay, TINY)
        replay.check_engine_is_well()
        replay.engine.close()


@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE == "cpu", reason="full size: needs a GPU and TEST_DEVICE=cuda")
def test_full_size(tmp_path: Path) -> None:
    """One forward of 5536 tokens, warm-up cap 4096, budget 8192, shape of Qwen3-0.6B with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    assert (FULL.step_tokens, FULL.cap, FULL.max_step_tokens) == (5536, 4096, 8192)

    def make(limits: Limits) -> Engine:
        return twinfer.fast.Engine.from_pretrained(tmp_path, random_seed=1, dtype="bfloat16", device=DEVICE, limits=limits, tokenizer=False)

    check(FULL, make)
    with OLD_BOUND.on():
        replay = together(FULL, make)
        (error,) = replay.errors()
        assert told_numbers(error, "token_ids") == (FULL.step_tokens, FULL.cap)
        replay.check_engine_is_well()
        replay.engine.close()
    with sized("token_ids", capacity=WARMUP_SIZE, audited=False)():
        replay = together(FULL, make)
        assert {told_numbers(error, "token_ids")[1] for error in replay.errors()} == {FULL.cap}
        replay.check_engine_is_well()
        replay.engine.close()


# ------------------------------------------------------------------------------------------------ where it really was: the rows of Gated DeltaNet


def with_states(engine: type[Engine], model: Path, **options: object) -> Make:
    """Opens `engine` over a model with Gated DeltaNet layers, a state slot for every row."""

    def make(limits: Limits) -> Engine:
        return engine.from_pretrained(  # type: ignore[attr-defined, no-any-return]
            model, limits=replace(limits, num_state_slots=limits.bucket(limits.max_batch)), device=DEVICE, tokenizer=False, **options
        )

    return make


def check_on_states(traffic: Traffic, make: Make, buffer: str) -> None:
    """Green with our bound; with `buffer` sized by the warm-up forward, refused by its numbers, and without an audit told by the executor."""
    check(traffic, make)
    for audited in (True, False):
        with sized(buffer, capacity=WARMUP_SIZE, audited=audited)():
            replay = together(traffic, make)
            ((told, capacity),) = {told_numbers(error, buffer) for error in replay.errors()}
            padded = ceil_div(traffic.step_tokens, EAGER) * EAGER  # what a GPU computes of it, if an audit lets it
            assert capacity == traffic.cap
            assert told == traffic.step_tokens or (told == padded and not audited)
            replay.check_engine_is_well()
            replay.engine.close()


@pytest.mark.parametrize(("engine", "buffer"), [(twinfer.reference.Engine, "token_ids"), (twinfer.fast.Engine, "gdn_values")])
def test_on_states(engine: type[Engine], buffer: str, tmp_path: Path) -> None:
    check_on_states(TINY_STATES, with_states(engine, write(tmp_path), dtype="float32"), buffer)


@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE == "cpu", reason="full size: needs a GPU and TEST_DEVICE=cuda")
@pytest.mark.parametrize(("engine", "buffer"), [(twinfer.reference.Engine, "token_ids"), (twinfer.fast.Engine, "gdn_values")])
def test_full_size_on_states(engine: type[Engine], buffer: str, tmp_path: Path) -> None:
    """One forward of 5536 tokens through [tokens, 32, 128] of Gated DeltaNet, warm-up cap 4096, chunks of at most 4096, budget 8192: Qwen3.5-4B's layers."""
    (tmp_path / "config.json").write_text(json.dumps(shape_source("qwen3.5-4b-4layers")))
    check_on_states(replace(FULL, page_size=64), with_states(engine, tmp_path, dtype="bfloat16", random_seed=1), buffer)
