"""Gate: nobody's request changes anybody else's, be it bad, taken back, or just there."""

from __future__ import annotations

import json

import pytest

from twinfer.invariants.gates.adapter import Ask, Refused
from twinfer.invariants.gates.judge import GateFailed, Judge
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import NotReached, Subject

NUM_NEW = 6


@pytest.mark.twinfer_requires("batch")
def test_batch_mates_change_nothing(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    asks = [Ask(prompts.fresh(length), NUM_NEW) for length in (40, 1, 7, 90, 41, 16)]
    together = engine.generate(asks)
    judge.judge(asks, together)


@pytest.mark.twinfer_requires("one_arithmetic", "logprobs", "batch")
def test_a_batch_gives_the_bits_of_single_requests(engine: Subject, prompts: Prompts) -> None:
    asks = [Ask(prompts.fresh(length), NUM_NEW) for length in (40, 1, 7)]
    alone = [answer for ask in asks for answer in engine.generate([ask])]
    together = engine.generate(asks)
    for ask, one, other in zip(asks, alone, together, strict=True):
        if list(one.logprobs or ()) != list(other.logprobs or ()) or list(one.tokens) != list(other.tokens):
            raise GateFailed(f"a prompt of {len(ask.prompt)}: {one.logprobs} alone, {other.logprobs} in a batch")


@pytest.mark.twinfer_requires("same_bits", "logprobs")
def test_the_same_call_gives_the_same_bits(engine: Subject, prompts: Prompts) -> None:
    """Shorter than a page, so that no hit makes the second call another one."""
    asks = [Ask(prompts.fresh(min(length, max(1, engine.block - NUM_NEW))), NUM_NEW) for length in (10, 3)]
    first, second = engine.generate(asks), engine.generate(asks)
    for one, other in zip(first, second, strict=True):
        if list(one.logprobs or ()) != list(other.logprobs or ()) or list(one.tokens) != list(other.tokens):
            raise GateFailed(f"{one.logprobs}, then {other.logprobs}")


@pytest.mark.parametrize("fault", ["empty", "too_long", "negative_token", "token_beyond_the_vocabulary"])
@pytest.mark.twinfer_requires("refusal")
def test_a_bad_request_is_refused_and_the_engine_serves_on(engine: Subject, judge: Judge, prompts: Prompts, fault: str) -> None:
    most = int(json.loads((engine.base.model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
    bad = {
        "empty": (),
        "too_long": prompts.fresh(most + 1),
        "negative_token": (*prompts.fresh(20), -1),
        "token_beyond_the_vocabulary": (*prompts.fresh(20), prompts.vocab_size),
    }[fault]
    good = Ask(prompts.fresh(37), NUM_NEW)
    if "step" in engine.capabilities:
        flight = engine.add(Ask(good.prompt, 3 * NUM_NEW))
        engine.run_until(lambda: len(flight.tokens) >= 2)
        try:
            refused = engine.add(Ask(bad, NUM_NEW))
        except Refused:
            engine.drain()
        else:
            engine.drain()
            if refused.error is None:
                raise GateFailed(f"{fault}: it was answered with {refused.tokens}")
        judge.judge([flight.ask], [engine.answer(flight)])
    if engine.refused(Ask(bad, NUM_NEW)) is None:
        raise GateFailed(f"{fault}: it was answered")
    judge.judge([good], engine.generate([good]))


@pytest.mark.parametrize("when", ["waiting", "after_one_step", "decoding"])
@pytest.mark.twinfer_requires("step", "abort")
def test_an_abort_changes_nobody_else(engine: Subject, judge: Judge, prompts: Prompts, when: str) -> None:
    mates = [engine.add(Ask(prompts.fresh(n), 3 * NUM_NEW)) for n in (20, 50)]
    engine.run_until(lambda: all(len(flight.tokens) >= 2 for flight in mates))
    gone = engine.add(Ask(prompts.fresh(300), 4 * NUM_NEW))
    if when == "after_one_step":
        engine.step()
    elif when == "decoding":
        engine.run_until(lambda: len(gone.tokens) >= 2)
    engine.abort(gone)
    late = engine.add(Ask(prompts.fresh(60), NUM_NEW))  # takes the row and the pages that have become free
    engine.drain()
    flights = [*mates, late]
    judge.judge([flight.ask for flight in flights], [engine.answer(flight) for flight in flights])
    if when == "decoding" and len(gone.tokens) == gone.ask.max_tokens:
        raise NotReached("the request had ended before it was taken back")


@pytest.mark.twinfer_requires("step", "abort", "set_chunk")
def test_a_prompt_that_was_aborted_half_way_comes_again(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """Only what was written may be found of it."""
    engine.use(max_chunk_tokens=20, max_step_tokens=64)
    prompt = prompts.fresh(100)
    gone = engine.add(Ask(prompt, NUM_NEW))
    engine.step()
    engine.step()
    if gone.tokens:
        raise GateFailed("a prompt of 100 was over after two steps of chunks of 20: max_chunk_tokens was not obeyed")
    engine.abort(gone)
    again = Ask(prompt, NUM_NEW)
    flight = engine.add(again)
    engine.drain()
    judge.judge([again], [engine.answer(flight)])
