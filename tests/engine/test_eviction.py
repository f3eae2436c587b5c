"""Which cached page is evicted first: the least recently used, and of one page list the tail before the head. Pool against a plain model; engine."""

from __future__ import annotations

import random

import numpy as np

from twinfer.engine.pages import PagePool
from twinfer.plan import PLAIN_FORMAT
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits

NUM_PAGES = 9


class Traffic:
    """Random page lists over a pool: taken, sealed, shared, released. Keeps its own last use of every cached page and expects evictions in that order."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        self.evicted: list[int] = []
        self.pool = PagePool(NUM_PAGES, np.zeros(NUM_PAGES + 1, np.int32), np.zeros(NUM_PAGES + 1, np.bool_), self.evicted.append)
        self.references = [0] * (NUM_PAGES + 1)
        self.sealed: set[int] = set()
        self.last_use: dict[int, tuple[int, int]] = {}  # cached page -> (when its last reference went, minus its index in that list)
        self.running: list[list[int]] = []
        self.remembered: list[list[int]] = []  # page lists of the past; a prefix hit is a beginning of one whose pages are still sealed
        self.num_evictions = self.num_shared = 0

    def enter(self) -> None:
        """A new page list: a hit, if the past has one, and new pages, some of which are sealed at once."""
        hits = self._hit() if self.remembered and self.random.random() < 0.6 else []
        unreferenced = sum(self.references[page] == 0 for page in hits)
        count = self.random.randint(1, 4)
        if count + unreferenced > self.pool.num_available:
            return
        for page in hits:
            self.references[page] += 1
            self.last_use.pop(page, None)
        self.pool.share(hits)
        self.num_shared += unreferenced
        new = self._allocate(count)
        pages = hits + new
        for page in new[: self.random.randint(0, count)]:
            self.pool.seal(page)
            self.sealed.add(page)
        self.running.append(pages)
        self.remembered.append([page for page in pages if page in self.sealed])

    def leave(self, time: int) -> None:
        """One page list is released."""
        if not self.running:
            return
        pages = self.running.pop(self.random.randrange(len(self.running)))
        for index, page in enumerate(pages):
            self.references[page] -= 1
            if self.references[page] == 0 and page in self.sealed:
                self.last_use[page] = (time, -index)
        self.pool.release(pages)

    def _hit(self) -> list[int]:
        pages = self.random.choice(self.remembered)
        return pages[: self.random.randint(0, len(pages))]

    def _allocate(self, count: int) -> list[int]:
        expected = sorted(self.last_use, key=lambda page: self.last_use[page])[: max(0, count - self.pool.num_free)]
        self.evicted.clear()
        pages = self.pool.allocate(count)
        assert self.evicted == expected, f"seed {self.seed}: evicted {self.evicted}, by last use {self.last_use} it should be {expected}"
        for page in expected:
            del self.last_use[page]
            self.sealed.discard(page)
        self.remembered = [kept for old in self.remembered if (kept := _before(old, set(expected)))]
        for page in pages:
            self.references[page] = 1
        self.num_evictions += len(expected)
        return pages


def _before(pages: list[int], gone: set[int]) -> list[int]:
    """The beginning of `pages` that has none of `gone`."""
    return pages[: next((i for i, page in enumerate(pages) if page in gone), len(pages))]


def check_order(seed: int, num_operations: int = 60) -> tuple[int, int]:
    """One run of random traffic; returns how many pages were evicted and how many cached pages were shared again."""
    traffic = Traffic(seed)
    for time in range(num_operations):
        traffic.enter()
        if traffic.random.random() < 0.7:
            traffic.leave(time)
        traffic.pool.check(traffic.running)
        assert set(traffic.pool.references.nonzero()[0].tolist()) == {page for pages in traffic.running for page in pages}, f"seed {seed}"
    return traffic.num_evictions, traffic.num_shared


def test_evictions_follow_the_last_use_whatever_the_traffic() -> None:
    evictions, shared = np.sum([check_order(seed) for seed in range(60)], axis=0)
    assert evictions > 500
    assert shared > 200


def run(engine: GhostEngine, *prompts: tuple[int, ...]) -> None:
    """Each prompt by itself, one token of answer."""
    for prompt in prompts:
        engine.add(Request(prompt, SamplingParams(temperature=0.0, max_tokens=1)))
        drain(engine)


def num_findable(engine: GhostEngine, prompt: tuple[int, ...]) -> int:
    """Pages of a prompt that a request would hit, looked up without touching their last use."""
    prefix, size = engine.scheduler.prefix, engine.limits.page_size
    digests = [prefix.root("", PLAIN_FORMAT)]
    for i in range(len(prompt) // size):
        digests.append(prefix.extend(digests[-1], np.array(prompt[i * size : (i + 1) * size], np.int32).tobytes()))
    return len(prefix.match(digests[1:]))


# 9 tokens are two full pages of 4 and one that is never sealed.
A, B, C = ((token,) * 9 for token in (0, 1, 2))


def check_engine_order() -> None:
    """Pool of 7: A and B leave two cached pages each and three free ones; C takes those, and every page that it seals pushes out an old one later."""
    engine = GhostEngine(limits(page_size=4, num_pages=7, max_context=28))
    run(engine, A, B)
    assert (num_findable(engine, A), num_findable(engine, B)) == (2, 2)
    run(engine, C)  # three free pages: nothing goes
    assert [num_findable(engine, prompt) for prompt in (A, B, C)] == [2, 2, 2]
    run(engine, A)  # a hit: A is now the one used last; its third page is the free one
    assert engine.scheduler.pool.num_evictions == 0
    run(engine, (0, 1, 2, 0, 1))  # two pages, one free: the tail of B goes
    assert [num_findable(engine, prompt) for prompt in (A, B, C)] == [2, 1, 2]
    run(engine, (1, 2, 0, 1, 2))  # one more: the head of B
    assert [num_findable(engine, prompt) for prompt in (A, B, C)] == [2, 0, 2]
    run(engine, (2, 2, 0, 1, 2))  # then the tail of C
    assert [num_findable(engine, prompt) for prompt in (A, B, C)] == [2, 0, 1]
    assert engine.scheduler.pool.num_evictions == 3


def test_a_hit_makes_a_prompt_the_last_to_go_and_tails_go_before_heads() -> None:
    check_engine_order()


def test_pages_in_use_stay_though_they_are_the_oldest() -> None:
    engine = GhostEngine(limits(page_size=4, num_pages=6, max_context=24))
    held = engine.add(Request(A, SamplingParams(temperature=0.0, max_tokens=8)))  # 16 tokens in cache at its end: 4 of 6 pages
    ends: set[int] = set()
    for first in (1, 2, 1, 2):
        for second in (0, 2):
            ends |= {event.request_id for event in engine.step() if event.terminal}
            engine.add(Request((first, second, 0, 1, 2), SamplingParams(temperature=0.0, max_tokens=1)))
            assert num_findable(engine, A) == 2, "a page in use was evicted"
    assert engine.scheduler.pool.num_evictions > 0
    assert held in ends
    drain(engine)
    assert at_baseline(engine.scheduler)
