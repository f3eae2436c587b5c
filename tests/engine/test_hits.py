"""What a prefix hit is, looked up when the request is admitted and no earlier, and what admission leaves when it refuses. Ghost executor.

Evictions between a look-up and its use, pages registered under another content, and references taken before a check that may still say no are faults of
public engines (docs/known_faults.md).
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import pytest

from twinfer.engine.prefix import PrefixCache
from twinfer.plan import StepPlan
from twinfer.request import Event, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of
from .test_eviction import num_findable

VOCAB = 997


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def rows_of(engine: GhostEngine) -> dict[int, list[tuple[int, int]]]:
    """Filled as the engine runs: by sequence, (first position, tokens) of each of its rows."""
    rows: dict[int, list[tuple[int, int]]] = {}
    launch = engine.executor.launch

    def watched(plan: StepPlan) -> None:
        for sequence, start, length in zip(plan.sequence.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True):
            rows.setdefault(sequence, []).append((start, length))
        launch(plan)

    engine.executor.launch = watched  # type: ignore[method-assign]
    return rows


def cached(events: list[Event], request_id: int) -> int:
    return next(event.num_cached_tokens for event in events if event.request_id == request_id)


def test_a_hit_ends_before_the_first_page_that_is_missing() -> None:
    """Later pages of the same prompt that are still there count for nothing: their keys are of no use without those before them."""
    cache = PrefixCache(4)
    digests = [bytes([i]) * 16 for i in range(4)]
    for gone in range(4):
        cache.clear()
        for page, digest in enumerate(digests, start=1):
            cache.seal(page, digest)
        cache.forget(gone + 1)
        assert cache.match(digests) == list(range(1, gone + 1))


def test_a_digest_is_128_bits_of_a_cryptographic_hash_of_everything_before() -> None:
    """So a hit needs no comparison of tokens, and nobody can prepare a prompt that hits another's pages. The salt keeps those apart who must not even
    learn that a prompt was there."""
    cache = PrefixCache(4)
    root = cache.root("", "plain")
    pages = [np.array(page, np.int32).tobytes() for page in ((1, 2, 3, 4), (5, 6, 7, 8))]
    first = cache.extend(root, pages[0])
    second = cache.extend(first, pages[1])
    assert first == blake2b(root + pages[0], digest_size=16).digest()
    assert second == blake2b(first + pages[1], digest_size=16).digest()
    others = [cache.root("tenant", "plain"), cache.root("", "k8v4"), PrefixCache(8).root("", "plain"), PrefixCache(4).root("'", "plain")]
    assert len({root, *others}) == 5
    assert all(cache.extend(other, pages[0]) != first for other in others)
    assert cache.extend(root, pages[1]) != second


def test_tokens_scheduled_are_counted_after_the_hit() -> None:
    """Ten tokens, then the same eight and two others: a row of two from position 8 on, not one that runs past the prompt's end."""
    engine = GhostEngine(limits(page_size=4, max_chunk_tokens=6), vocab_size=VOCAB)
    rows = rows_of(engine)
    prompt = tuple(range(10))
    for tail in ((8, 9), (50, 51)):
        engine.add(Request((*prompt[:8], *tail), greedy(2)))
        drain(engine)
    assert rows == {0: [(0, 6), (6, 4), (10, 1)], 1: [(8, 2), (10, 1)]}


def test_two_equal_prompts_submitted_together_are_right_and_share_when_the_first_is_written() -> None:
    """In the step that computes both nothing is shared, since nothing is written yet; in the next one the first's chunk is."""
    for chunk, step, hits in ((32, 32, [0, 0]), (6, 6, [0, 4])):
        engine = GhostEngine(limits(page_size=4, max_chunk_tokens=chunk, max_step_tokens=step), vocab_size=VOCAB)
        prompt = tuple(range(9))
        ids = [engine.add(Request(prompt, greedy(4))) for _ in range(2)]
        events = drain(engine)
        assert [tokens_of(events, request_id) for request_id in ids] == [solo(prompt, 4, vocab_size=VOCAB)] * 2
        assert [cached(events, request_id) for request_id in ids] == hits


def test_a_hit_that_is_gone_when_its_request_is_admitted_is_none() -> None:
    """R would hit two pages while it waits; the request before it needs all pages, and evicts them."""
    engine = GhostEngine(limits(max_batch=2, page_size=4, num_pages=6, max_context=24), vocab_size=VOCAB)
    prefix = tuple(range(8))
    engine.add(Request((*prefix, 8), greedy(1)))
    drain(engine)
    assert num_findable(engine, prefix) == 2
    large = engine.add(Request(tuple(range(100, 120)), greedy(4)))
    late = engine.add(Request((*prefix, 20, 21, 22, 23), greedy(3)))
    rows = rows_of(engine)
    events = drain(engine)
    assert num_findable(engine, tuple(range(100, 120))) > 0
    assert tokens_of(events, large) == solo(range(100, 120), 4, vocab_size=VOCAB)
    assert tokens_of(events, late) == solo((*prefix, 20, 21, 22, 23), 3, vocab_size=VOCAB)
    assert cached(events, late) == 0
    assert rows[2][0] == (0, 12)


def test_hits_of_one_step_are_kept_from_each_others_evictions() -> None:
    """Two requests with eight cached tokens each are admitted in one step of twelve tokens, while the first takes pages: within the step's tokens,
    with right answers, whichever of the hits is still there."""
    for num_pages in range(6, 12):
        engine = GhostEngine(limits(max_batch=3, max_step_tokens=12, page_size=4, num_pages=num_pages, max_context=24), vocab_size=VOCAB)
        prefixes = [tuple(range(i, i + 8)) for i in (0, 100)]
        for prefix in prefixes:
            engine.add(Request((*prefix, 1), greedy(1)))
            drain(engine)
        prompts = [(*prefix, *range(300 + i, 310 + i)) for i, prefix in enumerate(prefixes)]
        ids = [engine.add(Request(prompt, greedy(3))) for prompt in prompts]
        events = drain(engine, 60)
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert tokens_of(events, request_id) == solo(prompt, 3, vocab_size=VOCAB), f"{num_pages} pages"
        assert at_baseline(engine.scheduler)


def test_an_admission_that_is_refused_changes_nothing() -> None:
    """Two of five pages are the waiting prompt's hit, two are held, one is free: it needs three more. Refused a hundred times, it has taken nothing."""
    engine = GhostEngine(limits(max_batch=2, page_size=4, num_pages=5, max_context=24), vocab_size=VOCAB)
    prefix = tuple(range(8))
    engine.add(Request((*prefix, 8), greedy(1)))
    drain(engine)
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    engine.add(Request(tuple(range(50, 57)), greedy(2)))
    waits = engine.add(Request((*prefix, *range(200, 212)), greedy(1)))
    engine.step()

    def state() -> tuple[object, ...]:
        return pool.references.tolist(), pool.sealed.tolist(), list(pool._free), list(pool._cached), len(scheduler.prefix), scheduler.free_slots()

    before = state()
    assert pool.num_cached >= 2
    for _ in range(100):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.num_rows == 1
        assert state() == before
    assert scheduler.num_waiting == 1
    scheduler.check()
    assert tokens_of(drain(engine), waits) == solo((*prefix, *range(200, 212)), 1, vocab_size=VOCAB)


def test_every_full_page_that_was_computed_is_found_under_its_own_history() -> None:
    """Of a prompt that just fills its pages, of one that a hit has shortened, of outputs: floor(computed / page) pages, neither fewer nor others."""
    for seed in range(30):
        pick = random.Random(seed)
        size = pick.choice([1, 2, 4, 5])
        within = limits(max_batch=3, max_step_tokens=pick.randint(3, 20), page_size=size, max_context=40, num_pages=400)  # nothing is evicted
        engine = GhostEngine(within, vocab_size=VOCAB)
        histories: dict[int, tuple[tuple[int, ...], int]] = {}
        finished: list[tuple[int, ...]] = [tuple(pick.randrange(VOCAB) for _ in range(4 * size))]
        for _ in range(6):
            base = pick.choice(finished)
            prompt = (*base[: pick.randint(0, min(len(base), 20))], *(pick.randrange(VOCAB) for _ in range(pick.randint(0, 2 * size))))[:30] or (1,)
            new = pick.randint(1, 10)
            histories[engine.add(Request(prompt, greedy(new)))] = (prompt, new)
            if pick.random() < 0.5:
                drain(engine)
                finished += [(*p, *solo(p, n, vocab_size=VOCAB)) for p, n in histories.values()]
        drain(engine)
        for prompt, new in histories.values():
            computed = (*prompt, *solo(prompt, new, vocab_size=VOCAB))[:-1]
            assert num_findable(engine, computed) == len(computed) // size, f"seed {seed}"
        engine.scheduler.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_index_never_holds_more_than_the_pool(page_size: int) -> None:
    """Five hundred prompts that never come again through eight pages."""
    engine = GhostEngine(limits(page_size=page_size, num_pages=8, max_context=8), vocab_size=VOCAB)
    for i in range(500):
        engine.add(Request(tuple((i * 7 + k * 13) % VOCAB for k in range(page_size + 1)), greedy(1)))
        drain(engine)
        assert len(engine.scheduler.prefix) <= 8
        assert len(engine.scheduler.prefix) == engine.scheduler.pool.num_cached
    assert engine.scheduler.pool.num_evictions > 400
    assert engine.scheduler.pool.drop_cached() >= 7
    assert len(engine.scheduler.prefix) == 0
