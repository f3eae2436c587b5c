"""Where a request must end, to the token: the context's end, the pool's end, max_tokens, and prompts that just fill pages. Ghost executor.

One token off on either side of such an end hung, clipped or killed public engines (docs/known_faults.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinfer.errors import RequestRefused
from twinfer.limits import Limits, ceil_div
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of

C = 16
VOCAB = 997


def greedy(max_tokens: int | None, **more: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def check_end(engine: GhostEngine, num_prompt: int, asked: int | None, most: int) -> None:
    """`most` tokens fit behind the prompt: so many are given, more are refused by name; the engine goes on either way."""
    prompt = tuple(range(1, num_prompt + 1))
    if most < 1 or (asked is not None and asked > most):
        with pytest.raises(RequestRefused) as error:
            engine.add(Request(prompt, greedy(asked)))
        assert error.value.field in (("prompt",) if num_prompt > C or num_prompt > pool(engine.limits) else ("max_tokens",))
        assert not engine.has_work
        return
    request_id = engine.add(Request(prompt, greedy(asked)))
    wanted = most if asked is None else asked
    chunks = ceil_div(num_prompt, engine.limits.max_chunk_tokens)
    events = drain(engine, chunks + wanted + engine.limits.look_ahead)
    assert tokens_of(events, request_id) == solo(prompt, wanted, vocab_size=VOCAB)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert at_baseline(engine.scheduler)


def pool(within: Limits) -> int:
    return within.num_pages * within.page_size


@pytest.mark.parametrize("look_ahead", [0, 1])
@pytest.mark.parametrize("asked", [1, 2, 3, 4, 5, 10, 12, 15, 16, 17, 10**9, None])
def test_the_contexts_end(asked: int | None, look_ahead: int) -> None:
    """C tokens in all, the last of which is never computed: after a prompt of I tokens there are C - I, and none after one of C."""
    engine = GhostEngine(replace(limits(max_context=C, max_step_tokens=6, num_pages=8), look_ahead=look_ahead), vocab_size=VOCAB)
    for num_prompt in range(1, C + 2):
        check_end(engine, num_prompt, asked, C - num_prompt)


@pytest.mark.parametrize("look_ahead", [0, 1])
@pytest.mark.parametrize("asked", [1, 2, 4, 5, 6, 8, 9, None])
@pytest.mark.parametrize(("page_size", "num_pages"), [(4, 2), (1, 7), (8, 1), (3, 3)])
def test_the_pools_end(page_size: int, num_pages: int, asked: int | None, look_ahead: int) -> None:
    """A pool smaller than the context: what can never fit is refused at once, so that nobody waits behind it."""
    within = limits(max_context=C, max_step_tokens=6, page_size=page_size, num_pages=num_pages)
    engine = GhostEngine(replace(within, look_ahead=look_ahead), vocab_size=VOCAB)
    for num_prompt in range(1, C + 2):
        check_end(engine, num_prompt, asked, min(C - num_prompt, page_size * num_pages + 1 - num_prompt))


def test_what_can_never_fit_holds_up_nobody() -> None:
    engine = GhostEngine(limits(max_context=64, page_size=4, num_pages=4), vocab_size=VOCAB)
    first = engine.add(Request(tuple(range(10)), greedy(7)))
    with pytest.raises(RequestRefused, match="at most 16 tokens, the room in 4 pages"):
        engine.add(Request(tuple(range(30)), greedy(1)))
    second = engine.add(Request((1, 2, 3), greedy(5)))
    events = drain(engine, 20)
    assert tokens_of(events, first) == solo(range(10), 7, vocab_size=VOCAB)
    assert tokens_of(events, second) == solo((1, 2, 3), 5, vocab_size=VOCAB)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9, 12, 16])
def test_a_prompt_that_just_fills_its_pages_goes_on(num_prompt: int, prefix_cache: bool) -> None:
    """Alone, cold, then behind itself: three tokens each time, of which the first is that of the last prompt token, computed again on a full hit."""
    engine = GhostEngine(limits(page_size=4), vocab_size=VOCAB, prefix_cache=prefix_cache)
    prompt = tuple(range(num_prompt))
    for cached in (0, (num_prompt - 1) // 4 * 4 if prefix_cache else 0):
        request_id = engine.add(Request(prompt, greedy(3)))
        events = drain(engine, 3 + 1)
        assert tokens_of(events, request_id) == solo(prompt, 3, vocab_size=VOCAB)
        assert events[-1].num_cached_tokens == cached


def test_samples_for_which_there_is_no_room_at_once_come_one_after_another() -> None:
    """Twelve slots: one sample of a prompt of 6 and its 7 tokens. Three of them, by rows and by pages."""
    for within in (limits(max_batch=1, max_context=C), limits(max_batch=3, max_context=C, page_size=4, num_pages=3)):
        engine = GhostEngine(within, vocab_size=VOCAB)
        request_id = engine.add(Request((1, 2, 3, 4, 5, 6), greedy(7, n=3)))
        events = drain(engine, 200)
        for sample in range(3):
            assert tokens_of(events, request_id, sample) == solo((1, 2, 3, 4, 5, 6), 7, vocab_size=VOCAB)
        assert [event.terminal for event in events] == [False] * 20 + [True]
        assert at_baseline(engine.scheduler)
