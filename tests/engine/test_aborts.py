"""An abort at any step of a request's life, with steps in flight or none: one terminal event, no token after it, everything free, nobody else touched.

Chunks in progress, tokens in flight and clean-up that ran on another path than the normal end are where public engines leaked (docs/known_faults.md).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from twinfer.request import Event, FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of

VOCAB = 997
PROMPT, OTHER = tuple(range(20)), (5, 6, 7)
LENGTH = 4


def greedy(max_tokens: int, **more: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def opened(look_ahead: int, max_batch: int = 3) -> GhostEngine:
    within = limits(max_batch=max_batch, max_step_tokens=12, max_chunk_tokens=8, page_size=4)
    engine = GhostEngine(replace(within, look_ahead=look_ahead), vocab_size=VOCAB)
    engine.executor.history = None  # of an aborted request the engine never reads what is in flight, so it can't say what those rows should hold
    return engine


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_at_every_step(look_ahead: int, waits: bool, n: int) -> None:
    """Three chunks and four tokens: before the first, after each of them, and after the last. `waits`: behind a request that takes the only slot."""
    states = set()
    for moment in range(12):
        engine = opened(look_ahead, 1 if waits else 3)
        other = engine.add(Request(OTHER, greedy(12)))
        aborted = engine.add(Request(PROMPT, greedy(LENGTH, n=n)))
        events: list[Event] = []
        for _ in range(moment):
            events += engine.step()
        over = any(event.terminal for event in events if event.request_id == aborted)
        before = [tokens_of(events, aborted, sample) for sample in range(n)]
        scheduler = engine.scheduler
        running = any(sequence.request_id == aborted for sequence in scheduler.running())
        states.add("over" if over else "waiting" if not running else "decoding" if any(before) else "prefill")
        assert engine.abort(aborted) is not over
        assert not engine.abort(aborted)
        assert aborted not in {sequence.request_id for sequence in (*scheduler.running(), *scheduler.waiting())}
        again = engine.add(Request(PROMPT, greedy(LENGTH)))  # at once, with the same beginning
        events += drain(engine)
        assert [tokens_of(events, aborted, sample) for sample in range(n)] == before, f"a token came after the abort at step {moment}"
        ends = [event.finish_reason for event in events if event.request_id == aborted and event.finish_reason]
        assert FinishReason.ERROR not in ends
        assert len(ends) == n
        assert (FinishReason.ABORT in ends) is not over
        assert sum(event.terminal for event in events if event.request_id == aborted) == 1
        assert tokens_of(events, other) == solo(OTHER, 12, vocab_size=VOCAB)
        assert tokens_of(events, again) == solo(PROMPT, LENGTH, vocab_size=VOCAB)
        assert at_baseline(scheduler)
    assert states >= ({"waiting"} if waits else {"waiting", "prefill", "decoding", "over"})


def test_what_nobody_has_is_no_abort() -> None:
    engine = opened(0)
    assert not engine.abort(0)
    (result,) = engine.generate([PROMPT], greedy(2))
    for request_id in (result.request_id, 99, -1):
        assert not engine.abort(request_id)
    assert engine.step() == []


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_a_stream_aborts_if_and_only_if_it_is_left_before_its_end(look_ahead: int) -> None:
    """Left by closing, by leaving its block, by an exception in it, or by dropping it; consumed to the end, nothing is aborted."""

    def consume(engine: GhostEngine) -> None:
        assert len(list(engine.stream(PROMPT, greedy(3)))) == 3

    def close(engine: GhostEngine) -> None:
        stream = engine.stream(PROMPT, greedy(30))
        next(stream)
        stream.close()
        stream.close()

    def leave(engine: GhostEngine) -> None:
        with engine.stream(PROMPT, greedy(30)) as stream:
            next(stream)

    def fail(engine: GhostEngine) -> None:
        with contextlib.suppress(RuntimeError), engine.stream(PROMPT, greedy(30)) as stream:
            next(stream)
            raise RuntimeError

    def drop(engine: GhostEngine) -> None:
        next(engine.stream(PROMPT, greedy(30)))
        engine.step()

    for use, aborts in ((consume, 0), (close, 1), (leave, 1), (fail, 1), (drop, 1)):
        engine = opened(look_ahead)
        dropped: list[int] = []
        real = engine.scheduler.drop
        engine.scheduler.drop = lambda sequences, real=real, dropped=dropped: (dropped.extend(s.id for s in sequences), real(sequences))[1]  # type: ignore[method-assign,misc,assignment]
        use(engine)
        assert len(dropped) == aborts, use.__name__
        assert drain(engine) == []
        assert at_baseline(engine.scheduler)
