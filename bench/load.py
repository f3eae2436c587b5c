"""The load generator: drives a peer in a closed or an open loop and accounts for every request. It computes no tokens and prints nothing.

Closed loop: `concurrency` requests are in flight until all are done. Open loop: requests arrive at seeded Poisson times whether or not the peer
keeps up, and are timed from when they were due, so that a stalled peer can't hide its queue.

Every request ends exactly once: done, or with an error. What the peer says beyond that (a token after the end, an unknown request) is an
AccountingError; a request that ends with fewer or more tokens than asked, or that the peer forgets, is an error that is counted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from twinfer.bench.workloads import WARM_TOKENS, Item, Workload

PATIENCE_S = 600.0  # without any news a peer is taken to have lost its requests


@dataclass(frozen=True, slots=True)
class News:
    """What a peer reports of one request: tokens that are new, and whether it has ended (with `error`, if it failed)."""

    key: int
    num_tokens: int
    finished: bool = False
    error: str | None = None


class Peer(Protocol):
    """Something that serves requests: an engine in this process, another library, or a server behind HTTP."""

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Queues a request: greedy, exactly `max_tokens` tokens, end tokens ignored. A refusal is told by `poll`, not raised."""
        ...

    def poll(self) -> Sequence[News]:
        """Does some work, or waits a little, and tells what is new. Raises only when the peer is lost."""
        ...


class Clock(Protocol):
    """Time in seconds. Tests give one that they move themselves."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """The monotonic clock of the machine."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))


class AccountingError(Exception):
    """The peer reported something that no honest run can bring: names the request and what was said."""


@dataclass(slots=True)
class Served:
    """The life of one request. Times are the clock's; `sent` is when it was due. Ended exactly when `ended` is set."""

    key: int
    asked: int
    sent: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    ended: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of a run and its wall time, first due to last ended."""

    wall_s: float
    served: tuple[Served, ...]

    @property
    def errors(self) -> tuple[Served, ...]:
        return tuple(s for s in self.served if s.error is not None)

    def metrics(self) -> dict[str, float]:
        """Figures over the requests that are done: output tokens a second, time to first token and between tokens (ms; mean and p99), counts.

        A figure that nothing was measured for (the time between tokens of one-token outputs) is absent.
        """
        done = [s for s in self.served if s.error is None]
        tpot = [(s.last - s.first) / (s.num_tokens - 1) * 1e3 for s in done if s.num_tokens > 1 and s.last is not None and s.first is not None]
        ttft = [(s.first - s.sent) * 1e3 for s in done if s.first is not None]
        figures: dict[str, float] = {"done": len(done), "errors": len(self.served) - len(done)}
        if done and self.wall_s > 0:
            figures["out_tok_s"] = sum(s.num_tokens for s in done) / self.wall_s
        for name, values in (("tpot_ms", tpot), ("ttft_ms", ttft)):
            if values:
                figures[name] = sum(values) / len(values)
                figures[f"{name}_p99"] = percentile(values, 0.99)
        return figures


def percentile(values: Sequence[float], q: float) -> float:
    """The value at rank floor(q n) of the sorted values, the largest for q = 1: no interpolation, so a p99 is a request that happened."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def poisson_arrivals(count: int, rate: float, seed: int) -> tuple[float, ...]:
    """`count` arrival times in seconds from 0, with independent exponential gaps of mean 1 / rate."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate = {rate}: must be a positive number of requests a second")
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        times.append(at)
    return tuple(times)


def closed_loop(peer: Peer, items: Sequence[Item], concurrency: int, clock: Clock | None = None, patience_s: float = PATIENCE_S) -> Outcome:
    """Keeps `concurrency` requests in flight until every one has ended."""
    if concurrency < 1:
        raise ValueError(f"concurrency = {concurrency}: must be at least 1")
    return _Drive(peer, items, clock or WallClock(), patience_s).run(concurrency, None)


def open_loop(peer: Peer, items: Sequence[Item], arrivals: Sequence[float], clock: Clock | None = None, patience_s: float = PATIENCE_S) -> Outcome:
    """Submits request i at `arrivals[i]` seconds after the start (ascending), whatever is in flight."""
    if len(arrivals) != len(items) or any(a > b for a, b in pairwise(arrivals)):
        raise ValueError("arrivals must be ascending, one for each request")
    return _Drive(peer, items, clock or WallClock(), patience_s).run(None, arrivals)


def run_workload(peer: Peer, workload: Workload, vocab_size: int, clock: Clock | None = None, rate: float | None = None, seed: int = 0) -> Outcome:
    """Warms a shared prompt if the workload has one, then drives it: closed loop, or open loop at `rate` requests a second.

    Raises RuntimeError if the warming request fails: the figures would be of another workload.
    """
    items = workload.items(vocab_size)
    if workload.shared_prompt:
        warm = closed_loop(peer, [Item(items[0].prompt, min(WARM_TOKENS, items[0].max_tokens))], 1, clock)
        if warm.errors:
            raise RuntimeError(f"the request that warms the shared prompt failed: {warm.errors[0].error}")
    if rate is None:
        return closed_loop(peer, items, workload.concurrency, clock)
    return open_loop(peer, items, poisson_arrivals(len(items), rate, seed), clock)


@dataclass(slots=True)
class _Drive:
    """One run. `live` holds the keys submitted and not ended; keys are positions in `items`."""

    peer: Peer
    items: Sequence[Item]
    clock: Clock
    patience_s: float
    served: list[Served] = field(default_factory=list)
    live: set[int] = field(default_factory=set)

    def run(self, concurrency: int | None, arrivals: Sequence[float] | None) -> Outcome:
        start = heard = self.clock.now()
        while len(self.served) < len(self.items) or self.live:
            now = self.clock.now()
            while len(self.served) < len(self.items):
                due = now if arrivals is None else start + arrivals[len(self.served)]
                if due > now or (concurrency is not None and len(self.live) >= concurrency):
                    break
                self._submit(due)
                heard = now
            if not self.live:
                if arrivals is not None and len(self.served) < len(self.items):
                    self.clock.wait_until(start + arrivals[len(self.served)])
                continue
            try:
                news = self.peer.poll()
            except Exception as error:
                self._give_up(f"the peer was lost: {type(error).__name__}: {error}")
                break
            now = self.clock.now()
            for item in news:
                self._take(item, now)
            if news:
                heard = now
            elif now - heard > self.patience_s:
                self._give_up(f"no news for {self.patience_s:g} s")
                break
        first = min((s.sent for s in self.served), default=start)
        last = max((s.ended for s in self.served if s.ended is not None), default=start)
        return Outcome(last - first, tuple(self.served))

    def _submit(self, due: float) -> None:
        key = len(self.served)
        item = self.items[key]
        self.served.append(Served(key, item.max_tokens, due))
        self.live.add(key)
        self.peer.submit(key, item.prompt, item.max_tokens)

    def _take(self, news: News, now: float) -> None:
        if news.key not in self.live:
            known = 0 <= news.key < len(self.served)
            raise AccountingError(f"request {news.key}: {news.num_tokens} tokens reported " + ("after its end" if known else "but never sent"))
        if news.num_tokens < 0:
            raise AccountingError(f"request {news.key}: {news.num_tokens} new tokens")
        served = self.served[news.key]
        if news.num_tokens:
            served.first = now if served.first is None else served.first
            served.last = now
            served.num_tokens += news.num_tokens
        if news.finished or news.error is not None:
            served.error = news.error
            if served.error is None and served.num_tokens != served.asked:
                served.error = f"{served.num_tokens} tokens came, {served.asked} were asked for"
            served.ended = now
            self.live.remove(news.key)

    def _give_up(self, why: str) -> None:
        """Ends what is live and what was never sent, each with an error, so that the counts add up."""
        now = self.clock.now()
        for key in sorted(self.live):
            self.served[key].error, self.served[key].ended = why, now
        self.live.clear()
        for key in range(len(self.served), len(self.items)):
            self.served.append(Served(key, self.items[key].max_tokens, now, ended=now, error=f"never sent: {why}"))
