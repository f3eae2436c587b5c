"""Gate: what comes out of the prefix cache is what would have been computed, and nothing comes out that belongs to another prefix.

Most gates here follow a public failure of some engine; the comment says which.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from twinfer.invariants.gates.adapter import Answer, Ask
from twinfer.invariants.gates.judge import GateFailed, Judge
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import NotReached, Subject

NUM_NEW = 6
pytestmark = pytest.mark.twinfer_requires("cached_tokens")


def serve(engine: Subject, *asks: Ask) -> list[Answer]:
    """Requests one after another."""
    return [answer for ask in asks for answer in engine.generate([ask])]


def must_hit(answer: Answer, ask: Ask, at_least: int) -> None:
    """The gate's subject: without a hit nothing was looked at, and an engine that declares the cache has one."""
    if (answer.num_cached_tokens or 0) < at_least:
        raise GateFailed(f"{answer.num_cached_tokens} tokens of a known prompt of {len(ask.prompt)} came from the cache, at least {at_least} are there")


def test_a_warm_prompt_hits_and_says_the_same(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    size = engine.block
    ask = Ask(prompts.fresh(3 * size + size // 2), NUM_NEW)
    cold, warm = serve(engine, ask, ask)
    if cold.num_cached_tokens:
        raise GateFailed(f"{cold.num_cached_tokens} tokens of a prompt that nobody sent before came from the cache")
    must_hit(warm, ask, size)
    judge.judge([ask, ask], [cold, warm])
    if "one_arithmetic" in engine.capabilities and list(cold.logprobs or ()) != list(warm.logprobs or ()):
        raise GateFailed("behind a hit the log probabilities have other bits, though one_arithmetic is declared")


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_hits_around_a_page_boundary(engine: Subject, judge: Judge, prompts: Prompts, num_pages: int, beyond: int) -> None:
    """A full hit that leaves no token to compute, a last page that is not full, and one token more (vLLM issue 30320)."""
    size = engine.block
    prompt = prompts.fresh(num_pages * size + beyond)
    same, longer = Ask(prompt, NUM_NEW), Ask(prompt + prompts.text(size), NUM_NEW)
    answers = serve(engine, same, same, longer)
    must_hit(answers[1], same, (len(prompt) - 1) // size * size)
    must_hit(answers[2], longer, len(prompt) // size * size)
    judge.judge([same, same, longer], answers)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_second_turn_behind_generated_tokens(engine: Subject, judge: Judge, prompts: Prompts, beyond: int) -> None:
    """The last generated token was never computed: a page that ends with it is full, but not written (openinfer pull request 836)."""
    size = engine.block
    first = Ask(prompts.fresh(2 * size + beyond - NUM_NEW), NUM_NEW)
    (answer,) = serve(engine, first)
    second = Ask((*first.prompt, *answer.tokens, *prompts.text(size)), NUM_NEW)
    (next_answer,) = serve(engine, second)
    must_hit(next_answer, second, (len(first.prompt) // size) * size)
    judge.judge([first, second], [answer, next_answer])


def test_equal_pages_under_different_prefixes(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """A page's keys depend on all tokens before it: the same tokens behind others, or at another position, are no hit."""
    size = engine.block
    one, two, three = prompts.fresh(size), prompts.fresh(size), prompts.fresh(size)
    changed = (*one[:-1], prompts.other(one[-1]))
    orders = [(one, two, three), (two, three), (three, one), (one, three, two), (changed, two, three), (prompts.fresh(size), two), (one, two, three)]
    asks = [Ask((*(token for block in order for token in block), *prompts.text(2)), NUM_NEW) for order in orders]
    answers = serve(engine, *asks)
    must_hit(answers[-1], asks[-1], 3 * size)
    judge.judge(asks, answers)
    for i, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        known = max((num_common(ask.prompt, earlier.prompt) for earlier in asks[:i]), default=0)
        if (answer.num_cached_tokens or 0) > known:
            raise GateFailed(f"{answer.num_cached_tokens} tokens came from the cache, but {known} were the same from the beginning of any prompt before")


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two prompts have in common from the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.twinfer_requires("cache_salt")
def test_a_cache_salt_keeps_tenants_apart(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    prompt = prompts.fresh(3 * engine.block)
    asks = [Ask(prompt, NUM_NEW, cache_salt=salt) for salt in ("one", "two", "two", "one", "")]
    answers = serve(engine, *asks)
    must_hit(answers[2], asks[2], engine.block)
    must_hit(answers[3], asks[3], engine.block)
    for i in (1, 4):
        if answers[i].num_cached_tokens:
            raise GateFailed(f"salt {asks[i].cache_salt!r}: {answers[i].num_cached_tokens} tokens came from pages of another salt")
    judge.judge(asks, answers)


@pytest.mark.twinfer_requires("step", "set_num_pages")
def test_staggered_arrivals_list_more_pages_than_there_are(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """Pages are listed by reference: requests over one long prompt list far more of them than the pool has (openinfer issue 403).

    They have to come one by one, since pages can be found only when they are written, and to decode together.
    """
    size = engine.block
    each = max(4, min(24, 768 // size))  # pages of the shared prompt
    count = 12
    num_blocks = each + 3 * count  # for what each has of its own, and a margin
    engine.use(num_pages=engine.num_pages(num_blocks))
    prompt = prompts.fresh(each * size + 1)
    flights = [engine.add(Ask(prompt, 3 * count))]
    while len(flights) < count:
        engine.run_until(lambda: len(flights[-1].tokens) >= 2 or flights[-1].finished)
        flights.append(engine.add(Ask(prompt, 3 * count)))
    engine.drain()
    answers = [engine.answer(flight) for flight in flights]
    for flight, answer in zip(flights[1:], answers[1:], strict=True):
        must_hit(answer, flight.ask, (each - 1) * size)
    together = max(sum(step in flight.steps for flight in flights) for step in flights[-1].steps)
    if together * each <= num_blocks + together:
        raise NotReached(f"{together} requests of {each} pages decoded together, which {num_blocks} hold one by one")
    judge.judge([flight.ask for flight in flights], answers)


@pytest.mark.twinfer_requires("set_num_pages")
def test_recycled_pages_hold_nothing_of_their_last_owner(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """More prompts than the pool keeps, then the first ones again: whatever was evicted may not be found (openinfer issue 291)."""
    size = engine.block
    engine.use(num_pages=engine.num_pages(12))
    asks = [Ask(prompts.fresh(4 * size + 1), NUM_NEW) for _ in range(6)]
    order = [*asks, asks[0], asks[3], asks[5], asks[5]]
    answers = serve(engine, *order)
    must_hit(answers[-1], asks[5], size)
    if answers[6].num_cached_tokens == answers[-1].num_cached_tokens:
        raise GateFailed("nothing was evicted: six prompts of five pages are all there in a pool of 12, so that num_pages was not obeyed")
    judge.judge(order, answers)


@pytest.mark.twinfer_requires("step")
def test_a_hit_outlives_the_request_that_wrote_it(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """Shared pages are counted, not owned: the writer ends, somebody else needs pages, and the second reader goes on (vLLM issue 37076)."""
    size = engine.block
    if "set_num_pages" in engine.capabilities:
        engine.use(num_pages=engine.num_pages(13))  # few, so that what is free is soon taken
    prompt = prompts.fresh(3 * size)
    first = engine.add(Ask(prompt + prompts.text(2), NUM_NEW))
    engine.run_until(lambda: len(first.tokens) >= 2)
    second = engine.add(Ask(prompt + prompts.text(3), 4 * NUM_NEW))
    engine.run_until(lambda: first.finished)
    others = [engine.add(Ask(prompts.fresh(4 * size), 1)) for _ in range(3)]
    engine.drain()
    flights = [first, second, *others]
    answers = [engine.answer(flight) for flight in flights]
    must_hit(answers[1], second.ask, size)
    judge.judge([flight.ask for flight in flights], answers)
