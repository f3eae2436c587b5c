"""The first outage (https://github.com/pegainfer-project/pegainfer/pull/482): requests over one warm prompt, which list its pages once each. Not a test.

The page list was sized by the pool. One long prompt is computed and sealed; requests that begin with it arrive one after another, find its pages and
decode together. What they list is many times the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.outages.replay import Make, Replay, make_reference
from twinfer.limits import Limits, ceil_div


@dataclass(frozen=True, slots=True)
class Traffic:
    """`num_requests`, each the warm prompt of `num_prompt` tokens, one token of its own and `num_new` generated ones."""

    num_requests: int
    num_prompt: int
    num_new: int
    page_size: int
    max_step_tokens: int
    look_ahead: int = 0

    @property
    def pages_each(self) -> int:
        """Pages of one whole request; the last token is never written."""
        return ceil_div(self.num_prompt + self.num_new + self.look_ahead, self.page_size)

    @property
    def limits(self) -> Limits:
        """A pool that holds the prompt once, and what each request needs beside it."""
        shared = self.num_prompt // self.page_size
        context = self.num_prompt + 1 + self.num_new
        return Limits(
            max_batch=self.num_requests, max_step_tokens=self.max_step_tokens, max_chunk_tokens=self.max_step_tokens, warmup_tokens=1,
            max_context=context, max_step_context=self.num_requests * context, max_logit_tokens=min(256, self.num_requests), page_size=self.page_size,
            num_pages=shared + self.num_requests * (self.pages_each - shared), look_ahead=self.look_ahead,
        )  # fmt: skip

    @property
    def old_capacity(self) -> int:
        """What the page list held then: the pool's pages and one a row."""
        return self.limits.num_pages + self.limits.max_batch

    def prompt(self) -> list[int]:
        return [(7 * i + i // 3) % 200 for i in range(self.num_prompt)]


# A burst of TINY is admitted in one step, so that nothing is sealed when its pages are looked for.
TINY = Traffic(num_requests=6, num_prompt=24, num_new=10, page_size=4, max_step_tokens=64)
TINY_FAST = Traffic(num_requests=3, num_prompt=8, num_new=3, page_size=2, max_step_tokens=12)
FULL = Traffic(num_requests=256, num_prompt=3000, num_new=300, page_size=16, max_step_tokens=8192, look_ahead=1)


def staggered(traffic: Traffic, make: Make) -> Replay:
    """The outage: seals the prompt, then one request a step."""
    replay = Replay(make(traffic.limits))
    replay.add(traffic.prompt(), 1)
    replay.drain()
    assert replay.engine.scheduler.pool.num_cached == traffic.num_prompt // traffic.page_size, "the prompt is sealed"
    for i in range(traffic.num_requests):
        replay.add([*traffic.prompt(), i % 200], traffic.num_new)
        replay.step()
    replay.drain()
    return replay


def burst(traffic: Traffic, make: Make) -> Replay:
    """The control: as many as the pool holds, all at once. Nothing is sealed when they are admitted, so each computes the prompt on pages of its own.

    More of them would wait and be admitted when pages are sealed: staggered, by the scheduler.
    """
    replay = Replay(make(traffic.limits))
    for i in range(traffic.limits.num_pages // traffic.pages_each):
        replay.add([*traffic.prompt(), i % 200], traffic.num_new)
    replay.drain()
    return replay


def check_in_band(replay: Replay, traffic: Traffic) -> None:
    """The replay is worth something only if a step listed more than the old list held."""
    most = replay.references()
    assert most > traffic.old_capacity, f"{most} references in the largest step, the old list held {traffic.old_capacity}"
    assert max(plan.num_rows for plan in replay.plans) == traffic.num_requests, "all requests decode together"
    assert replay.engine.scheduler.num_prefix_hits == traffic.num_requests * (traffic.num_prompt // traffic.page_size * traffic.page_size)


def check(traffic: Traffic, make: Make) -> None:
    """Green with the right bound."""
    replay = staggered(traffic, make)
    try:
        replay.check_all_completed()
        check_in_band(replay, traffic)
        replay.check_engine_is_well()
    finally:
        replay.engine.close()


def gate() -> None:
    check(TINY, make_reference)
