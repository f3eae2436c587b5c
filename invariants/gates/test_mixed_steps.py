"""Gate: prefill and decode in one step, and several prompts in one, give what each gives alone."""

from __future__ import annotations

import pytest

from twinfer.invariants.gates.adapter import Ask
from twinfer.invariants.gates.judge import Judge
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import Flight, NotReached, Subject

NUM_NEW = 6
pytestmark = pytest.mark.twinfer_requires("step")


def finish(engine: Subject, judge: Judge, flights: list[Flight]) -> None:
    engine.drain()
    judge.judge([flight.ask for flight in flights], [engine.answer(flight) for flight in flights])


@pytest.mark.parametrize("length", [1, 17, 65, 200])
def test_prefill_beside_decode(engine: Subject, judge: Judge, prompts: Prompts, length: int) -> None:
    decoding = [engine.add(Ask(prompts.fresh(n), 4 * NUM_NEW)) for n in (3, 33)]
    engine.run_until(lambda: all(len(flight.tokens) >= 2 for flight in decoding))
    late = engine.add(Ask(prompts.fresh(length), NUM_NEW))
    finish(engine, judge, [*decoding, late])
    if not any(late.steps[0] in flight.steps for flight in decoding):
        raise NotReached("no step held the last of a prompt and a decode row: the engine keeps them apart")


@pytest.mark.parametrize("count", [2, 3, 5, 8, 9, 16])
def test_decode_batches(engine: Subject, judge: Judge, prompts: Prompts, count: int) -> None:
    """Batches at and beside the sizes that graphs are captured for; contexts of all lengths, so that one row's pages end while another's go on."""
    flights = [engine.add(Ask(prompts.fresh(1 + 11 * i), count + NUM_NEW)) for i in range(count)]
    finish(engine, judge, flights)
    together = max(sum(step in flight.steps for flight in flights) for step in flights[0].steps)
    if together < count:
        raise NotReached(f"{count} requests were there, at most {together} had a token from one step")


def test_rows_that_come_and_go(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """A long request's row is taken over by a short one: what is left of the long one's page list may not be read (vLLM issue 39589)."""
    flights = [engine.add(Ask(prompts.fresh(n), m)) for n, m in ((150, 2), (9, 20), (70, 3))]
    for length in (1, 40, 2, 100):
        engine.run_until(lambda: any(flight.finished for flight in flights[-3:]) or len(flights[-1].tokens) >= 1)
        flights.append(engine.add(Ask(prompts.fresh(length), NUM_NEW)))
    finish(engine, judge, flights)


# Tokens of the step, between one chunk and two: (32, 64] with chunks of 32. Each pair of prompts fits the chunk alone, together they do not.
@pytest.mark.parametrize("lengths", [(17, 17), (31, 17), (32, 29), (32, 30)], ids=lambda pair: f"{sum(pair)}")
@pytest.mark.twinfer_requires("set_chunk")
def test_prompts_that_exceed_one_chunk_together(engine: Subject, judge: Judge, prompts: Prompts, lengths: tuple[int, int]) -> None:
    """Buffers by the tokens of a step, not of a chunk: prompts below the cap, beside decode rows, above it in sum (genesis-vllm-patches issue 33)."""
    engine.use(max_chunk_tokens=32, max_step_tokens=64)
    decoding = [engine.add(Ask(prompts.fresh(n), 4 * NUM_NEW)) for n in (5, 9)]
    engine.run_until(lambda: all(len(flight.tokens) >= 2 for flight in decoding))
    late = [engine.add(Ask(prompts.fresh(n), NUM_NEW)) for n in lengths]
    finish(engine, judge, [*decoding, *late])
    if late[0].steps[0] != late[1].steps[0] or late[0].steps[0] not in decoding[0].steps:
        raise NotReached(f"prompts of {lengths} and decode rows did not share a step of {sum(lengths) + 2} tokens")
