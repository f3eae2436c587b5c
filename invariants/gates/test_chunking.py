"""Gate: a prompt that is computed in chunks says what it says in one piece, wherever the boundaries lie."""

from __future__ import annotations

import pytest

from twinfer.invariants.gates.adapter import Ask
from twinfer.invariants.gates.judge import GateFailed, Judge
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import Subject

NUM_NEW = 4
# Shorter than pages of 16, one and three of them, and one that no page size divides.
CHUNKS = (5, 16, 48, 50)
pytestmark = pytest.mark.twinfer_requires("set_chunk", "step")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompts_around_chunk_boundaries(engine: Subject, judge: Judge, prompts: Prompts, chunk: int) -> None:
    engine.use(max_chunk_tokens=chunk, max_step_tokens=max(64, chunk))
    asks = [Ask(prompts.fresh(length), NUM_NEW) for length in (chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 2)]
    answers = []
    for ask in asks:
        flight = engine.add(ask)
        engine.drain()
        answers.append(engine.answer(flight))
        taken, due = flight.steps[0] - flight.added_after, -(-len(ask.prompt) // chunk)
        if taken < due:
            raise GateFailed(f"a prompt of {len(ask.prompt)} took {taken} steps, {due} chunks of {chunk} it has: max_chunk_tokens was not obeyed")
    judge.judge(asks, answers)


@pytest.mark.parametrize("chunk", [16, 50])
@pytest.mark.twinfer_requires("cached_tokens")
def test_chunks_behind_a_hit(engine: Subject, judge: Judge, prompts: Prompts, chunk: int) -> None:
    """The first chunk begins where the hit ends, so that its boundaries lie elsewhere than a cold prompt's."""
    engine.use(max_chunk_tokens=chunk, max_step_tokens=max(64, chunk))
    size = engine.block
    known = prompts.fresh(2 * size)
    asks = [Ask(known, NUM_NEW), Ask(known + prompts.text(2 * chunk + 3), NUM_NEW)]
    answers = [answer for ask in asks for answer in engine.generate([ask])]
    if not answers[1].num_cached_tokens:
        raise GateFailed("a prompt that begins with a known one did not hit")
    judge.judge(asks, answers)
