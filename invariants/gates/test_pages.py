"""Gate: every page is free, held or cached at every step, and held by nobody when nobody is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from twinfer.invariants.gates.adapter import Ask, Pages, Refused
from twinfer.invariants.gates.judge import GateFailed
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import Subject

NUM_NEW = 6
pytestmark = pytest.mark.twinfer_requires("pages", "step")


def sound(pages: Pages) -> Pages:
    """Itself; GateFailed unless each page is in one place."""
    if pages.free + pages.held + pages.cached != pages.total or min(pages.free, pages.held, pages.cached) < 0:
        raise GateFailed(f"free {pages.free} + held {pages.held} + cached {pages.cached} is not {pages.total} pages")
    return pages


def drained(engine: Subject) -> Pages:
    """Pages when the last request is over. An idle step or two may be what lets go of them."""
    engine.drain()
    for _ in range(3):
        if sound(engine.pages()).held == 0:
            break
        engine.step()
    pages = sound(engine.pages())
    if pages.held:
        raise GateFailed(f"{pages.held} of {pages.total} pages are held, but no request is left")
    return pages


def most_held(engine: Subject, reached: Callable[[], bool]) -> int:
    """Steps until `reached()`, looks at the pages after each, and says how many were held at most."""
    held = [0]

    def look() -> bool:
        held.append(sound(engine.pages()).held)
        return reached()

    engine.run_until(look)
    return max(held)


def test_free_held_and_cached_add_up_at_every_step(engine: Subject, prompts: Prompts) -> None:
    drained(engine)
    shared = prompts.fresh(3 * engine.block)
    flights = [engine.add(Ask(shared + prompts.text(n), NUM_NEW)) for n in (1, 5, 40)]
    held = most_held(engine, lambda: bool(flights[0].tokens))
    flights += [engine.add(Ask(shared + prompts.text(n), NUM_NEW)) for n in (2, 3)]
    held = max(held, most_held(engine, lambda: all(flight.finished for flight in flights)))
    if held < engine.num_pages(4):
        raise GateFailed(f"at most {held} pages were held while five requests of four pages and more ran")
    drained(engine)


@pytest.mark.twinfer_requires("abort")
def test_an_abort_gives_its_pages_back(engine: Subject, prompts: Prompts) -> None:
    """Waiting, between two steps of its prompt, and decoding (openinfer issue 215)."""
    before = drained(engine)
    for num_steps in (0, 1, 2, 4):
        gone = engine.add(Ask(prompts.fresh(200), 4 * NUM_NEW))
        stays = engine.add(Ask(prompts.fresh(30), NUM_NEW))
        for _ in range(num_steps):
            engine.step()
        engine.abort(gone)
        after = drained(engine)
        assert stays.finished
        if after.total != before.total:
            raise GateFailed(f"{before.total} pages before, {after.total} after an abort")


@pytest.mark.twinfer_requires("refusal")
def test_a_refusal_holds_nothing(engine: Subject, prompts: Prompts) -> None:
    drained(engine)
    for bad in ((), (*prompts.fresh(50), prompts.vocab_size)):
        with suppress(Refused):
            engine.add(Ask(bad, NUM_NEW))
        drained(engine)


@pytest.mark.twinfer_requires("set_prefix_cache")
def test_without_a_prefix_cache_all_pages_come_back(engine: Subject, prompts: Prompts) -> None:
    """Two rounds of the same requests leave the pool as it was (openinfer issue 681)."""
    engine.use(prefix_cache=False)
    before = drained(engine)
    asks = [Ask(prompts.fresh(3 * engine.block + n), NUM_NEW) for n in (0, 1, 7)]
    for _ in range(2):
        flights = [engine.add(ask) for ask in asks]
        after = drained(engine)
        if after != before or any(flight.num_cached_tokens for flight in flights):
            raise GateFailed(f"{before} before, {after} after, and hits of {[flight.num_cached_tokens for flight in flights]} tokens without a cache")


@pytest.mark.twinfer_requires("set_num_pages")
def test_a_pool_that_is_too_small_for_all_serves_all(engine: Subject, prompts: Prompts) -> None:
    """Six requests of four pages and a pool of twelve: some wait or are computed anew, all are answered, and everything comes back."""
    size = engine.block
    num_pages = engine.num_pages(12)
    engine.use(num_pages=num_pages)
    flights = [engine.add(Ask(prompts.fresh(3 * size), NUM_NEW)) for _ in range(6)]
    held = most_held(engine, lambda: all(flight.finished for flight in flights))
    for flight in flights:
        engine.answer(flight)
    if held <= num_pages // 2:
        raise GateFailed(f"at most {held} of {num_pages} pages were held while six requests of four pages waited")
    if (total := drained(engine).total) > num_pages:
        raise GateFailed(f"{total} pages, {num_pages} were asked for")
