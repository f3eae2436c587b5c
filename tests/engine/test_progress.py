"""Progress under pressure: pools that are too small, steady arrivals, endless decoders. Every bound in steps is computed, none is a guess. Ghost executor.

Each case hung, thrashed or killed a public engine once (docs/known_faults.md).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from twinfer.engine.sequence import Sequence
from twinfer.limits import Limits, ceil_div
from twinfer.plan import StepPlan
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of

VOCAB = 997  # prompts that differ share nothing by chance


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def watch(engine: GhostEngine) -> list[StepPlan]:
    """A list to which the engine appends every plan that it launches."""
    plans: list[StepPlan] = []
    launch = engine.executor.launch

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    engine.executor.launch = watched  # type: ignore[method-assign]
    return plans


def most_steps(within: Limits, asks: list[tuple[int, int]]) -> int:
    """Steps after which all (prompt tokens, output tokens) are over, if the first to arrive never loses what it has computed.

    Once a request is the oldest, it computes what it knows again, at worst from its beginning and beside a decode row of everybody else, and then one
    token a step; those behind it may bring nothing until then. With steps planned ahead, a plan may have to wait for those in flight.
    """
    chunk = min(within.max_chunk_tokens, within.max_step_tokens - (within.max_batch - 1))
    return (1 + within.look_ahead) * sum(ceil_div(prompt + new - 1, chunk) + new for prompt, new in asks)


def check_all_end(within: Limits, asks: list[tuple[int, int]], prefix_cache: bool, what: str = "") -> GhostEngine:
    """All at once: right tokens, within the bound, nothing held afterwards; a request is preempted for an older one only."""
    engine = GhostEngine(within, vocab_size=VOCAB, prefix_cache=prefix_cache)
    preempt = engine.scheduler._preempt

    def watched(sequence: Sequence) -> None:
        assert len(engine.scheduler.running()) > 1, "nobody is left for whose sake it could be preempted"
        assert all(other.id <= sequence.id for other in engine.scheduler.running()), "preempted for a younger one"
        preempt(sequence)

    engine.scheduler._preempt = watched  # type: ignore[method-assign]
    prompts = [tuple((31 * i + k) % VOCAB for k in range(length)) for i, (length, _) in enumerate(asks)]
    ids = [engine.add(Request(prompt, greedy(new))) for prompt, (_, new) in zip(prompts, asks, strict=True)]
    events = drain(engine, most_steps(within, asks))
    for request_id, prompt, (_, new) in zip(ids, prompts, asks, strict=True):
        assert tokens_of(events, request_id) == solo(prompt, new, vocab_size=VOCAB), what
    assert at_baseline(engine.scheduler)
    return engine


TIGHT: dict[str, tuple[Limits, list[tuple[int, int]]]] = {
    # Two contexts of 31 tokens, eight pages each, in eight pages.
    "re-admitted by its next chunk": (limits(max_batch=2, max_step_tokens=8, max_chunk_tokens=4, max_context=32, num_pages=8), [(20, 12)] * 2),
    "evicted, queued and computed again for ever": (limits(max_batch=4, max_step_tokens=16, max_context=28, num_pages=10), [(8, 20)] * 4),
    # Three decoders hold six of eight pages when a prompt of five pages, in chunks of two, comes along.
    "a chunk that no page is left for": (limits(max_batch=4, max_step_tokens=16, max_chunk_tokens=8, num_pages=8), [(5, 9), (5, 9), (5, 9), (20, 2)]),
    "one page a request": (limits(max_batch=3, page_size=8, max_context=8, num_pages=1), [(2, 2), (2, 2), (3, 5)]),
}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", TIGHT)
def test_a_tight_pool_ends_all_requests_within_a_computed_bound(name: str, prefix_cache: bool) -> None:
    within, asks = TIGHT[name]
    engine = check_all_end(within, asks, prefix_cache)
    assert engine.scheduler.num_preemptions < 2 * len(asks), "thrashing"


def test_any_tight_pool_does() -> None:
    preempted = chunked = 0
    for seed in range(40):
        pick = random.Random(seed)
        max_batch, page_size, max_context = pick.randint(1, 5), pick.choice([1, 2, 4, 8]), pick.randint(8, 32)
        step = pick.randint(max_batch, 24)
        one = ceil_div(max_context, page_size)
        within = limits(
            max_batch=max_batch, max_step_tokens=step, max_chunk_tokens=pick.randint(1, step), max_context=max_context, page_size=page_size,
            num_pages=pick.randint(one, 2 * one),
        )  # fmt: skip
        within = replace(within, look_ahead=pick.choice([0, 0, 1, 2]))
        asks = [(prompt, pick.randint(1, max_context - prompt)) for prompt in (pick.randint(1, max_context - 1) for _ in range(7))]
        engine = check_all_end(within, asks, pick.random() < 0.5, f"seed {seed}")
        preempted += engine.scheduler.num_preemptions
        chunked += any(prompt > within.max_chunk_tokens for prompt, _ in asks)
    assert preempted > 30
    assert chunked > 20


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_a_warm_prompt_listed_by_all_asks_for_more_references_than_the_pool_has_pages(look_ahead: int) -> None:
    """Twelve pages, six of them the prompt's: six requests list them all, and reach the end of their own page together, when none is free."""
    within = limits(max_batch=6, max_step_tokens=40, max_context=32, page_size=4, num_pages=12)
    engine = GhostEngine(replace(within, look_ahead=look_ahead), vocab_size=VOCAB)
    warm = tuple(range(24))
    engine.add(Request(warm, greedy(1)))
    drain(engine)
    plans = watch(engine)
    prompts = [(*warm, 100 + i) for i in range(6)]
    ids = [engine.add(Request(prompt, greedy(7))) for prompt in prompts]
    events = drain(engine)
    cold = GhostEngine(replace(within, look_ahead=look_ahead), vocab_size=VOCAB, prefix_cache=False)
    others = [cold.add(Request(prompt, greedy(7))) for prompt in prompts]
    unshared = drain(cold)
    for request_id, other, prompt in zip(ids, others, prompts, strict=True):
        assert tokens_of(events, request_id) == tokens_of(unshared, other) == solo(prompt, 7, vocab_size=VOCAB)
    references = max(int((-(-(plan.start + plan.length) // within.page_size)).sum()) for plan in plans)
    assert references == 6 * 7 > 3 * within.num_pages
    assert engine.ledger.capacity("page_indices") >= 6 * 8
    assert engine.scheduler.num_preemptions > 0
    assert at_baseline(engine.scheduler)


def test_a_running_request_gets_a_token_in_every_step_whatever_arrives() -> None:
    """A prompt that fills the step's tokens arrives before each of them."""
    engine = GhostEngine(limits(max_batch=4, max_step_tokens=8, max_context=64), vocab_size=VOCAB)
    decoder = engine.add(Request((1, 2), greedy(50)))
    engine.step()
    for i in range(49):
        engine.add(Request(tuple(range(i, i + 8)), greedy(1)))
        assert sum(event.request_id == decoder for event in engine.step()) == 1, f"no token in step {i}"
    drain(engine)


@pytest.mark.parametrize(("max_step_tokens", "chunk"), [(32, 4), (6, 4), (3, 3)])
def test_the_first_token_comes_within_its_chunks_however_many_decode(max_step_tokens: int, chunk: int) -> None:
    engine = GhostEngine(limits(max_batch=3, max_step_tokens=max_step_tokens, max_chunk_tokens=chunk), vocab_size=VOCAB)
    for i in range(2):
        engine.add(Request((i, 3), greedy(60)))
    engine.step()
    engine.step()
    late = engine.add(Request(tuple(range(20)), greedy(1)))
    in_a_step = min(chunk, max_step_tokens - 2)  # two tokens are the decoders'
    for _ in range(ceil_div(20, in_a_step) - 1):
        assert {event.request_id for event in engine.step()} == {0, 1}
    assert late in {event.request_id for event in engine.step()}


@pytest.mark.parametrize("needy_first", [True, False])
def test_a_request_that_lacks_a_page_holds_up_nobody_who_has_room(needy_first: bool) -> None:
    """Three pages of four tokens: one request has a token's room in its second page, the other none in its only one."""
    engine = GhostEngine(limits(max_batch=2, max_context=12, page_size=4, num_pages=3), vocab_size=VOCAB)
    roomy, needy = Request((1, 2, 3, 4, 5), greedy(3)), Request((6, 7, 8, 9), greedy(3))
    asks = [needy, roomy] if needy_first else [roomy, needy]
    ids = [engine.add(ask) for ask in asks]
    assert [event.request_id for event in engine.step()] == ids
    assert engine.scheduler.pool.num_available == 0
    # The younger one gives way if a page is needed that it holds; the older one has its token in this very step.
    assert [event.request_id for event in engine.step()] == ids[:1]
    events = drain(engine)
    for request_id, ask in zip(ids, asks, strict=True):
        assert tokens_of(events, request_id) == solo(ask.prompt, 3, vocab_size=VOCAB)[-len(tokens_of(events, request_id)) :]
    assert at_baseline(engine.scheduler)


def test_admission_counts_pages_and_not_tokens() -> None:
    """One page of eight tokens is free: two prompts of two tokens would fit into it together, but each needs a page of its own."""
    engine = GhostEngine(limits(max_batch=3, page_size=8, max_context=16, num_pages=2), vocab_size=VOCAB)
    holder = engine.add(Request((1,), greedy(8)))
    engine.step()
    first, second = (engine.add(Request((i, 5), greedy(2))) for i in (2, 3))
    plans = watch(engine)
    events = engine.step()
    assert {event.request_id for event in events} == {holder, first}
    assert engine.scheduler.num_waiting == 1
    events += drain(engine)
    assert tokens_of(events, second) == solo((3, 5), 2, vocab_size=VOCAB)
    assert max(plan.num_rows for plan in plans) == 2
    assert engine.scheduler.num_preemptions == 0
