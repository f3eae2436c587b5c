"""The load generator against scripted peers and a clock of the test's own: every request ends once, every figure is what the times say."""

from __future__ import annotations

import math
import random

import pytest

from tests.bench.fakes import FakeClock, ScriptedPeer, SteadyPeer
from twinfer.bench.load import AccountingError, News, closed_loop, open_loop, percentile, poisson_arrivals, run_workload
from twinfer.bench.workloads import Item, Span, Workload


def items(count: int, tokens: int = 3) -> list[Item]:
    return [Item((i,), tokens) for i in range(count)]


def test_closed_loop_keeps_its_concurrency_and_its_tail() -> None:
    clock = FakeClock()
    peer = SteadyPeer(clock)
    outcome = closed_loop(peer, items(5), 2, clock)
    assert peer.most_live == 2
    assert peer.prompts == [(0,), (1,), (2,), (3,), (4,)]
    # 2 + 2 + 1 requests of 3 steps each: 9 s, 15 tokens
    assert outcome.wall_s == 9.0
    assert outcome.metrics() == {
        "done": 5,
        "errors": 0,
        "out_tok_s": pytest.approx(15 / 9),
        "tpot_ms": 1000.0,
        "tpot_ms_p99": 1000.0,
        "ttft_ms": 1000.0,
        "ttft_ms_p99": 1000.0,
    }


def test_times_of_one_request() -> None:
    clock = FakeClock()
    # first tokens with the second poll, two at once; nothing with the third; the last with the fourth
    said = {2: [News(0, 2)], 4: [News(0, 1, finished=True)]}
    outcome = closed_loop(ScriptedPeer(clock, lambda poll, live: said.get(poll, [])), items(1), 1, clock)
    metrics = outcome.metrics()
    assert metrics["ttft_ms"] == 2000.0
    assert metrics["tpot_ms"] == 1000.0  # 2 s between first and last, 3 tokens
    assert outcome.wall_s == 4.0


def test_one_token_outputs_have_no_time_between_tokens() -> None:
    clock = FakeClock()
    metrics = closed_loop(SteadyPeer(clock), items(3, 1), 3, clock).metrics()
    assert "tpot_ms" not in metrics
    assert metrics["done"] == 3


def test_open_loop_times_from_when_a_request_was_due() -> None:
    clock = FakeClock()
    # both are due within the first poll of request 0, which takes 10 s
    outcome = open_loop(SteadyPeer(clock, 10.0), items(3, 1), [0.0, 1.0, 30.0], clock)
    assert [s.sent - 100.0 for s in outcome.served] == [0.0, 1.0, 30.0]
    assert [s.first - s.sent for s in outcome.served if s.first is not None] == [10.0, 19.0, 10.0]
    assert outcome.wall_s == 40.0


def test_open_loop_does_not_wait_for_the_peer() -> None:
    clock = FakeClock()
    peer = SteadyPeer(clock)
    outcome = open_loop(peer, items(50, 100), [0.0] * 50, clock)
    assert peer.most_live == 50
    assert outcome.metrics()["done"] == 50


def test_poisson_arrivals_are_seeded_and_have_the_rate() -> None:
    times = poisson_arrivals(4000, 8.0, seed=3)
    assert times == poisson_arrivals(4000, 8.0, seed=3)
    assert times != poisson_arrivals(4000, 8.0, seed=4)
    assert list(times) == sorted(times)
    assert 4000 / times[-1] == pytest.approx(8.0, rel=0.05)  # the deviation of the mean of 4000 gaps is 1.6 %
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="rate"):
            poisson_arrivals(1, rate, 0)


def test_errors_are_counted_and_keep_out_of_the_figures() -> None:
    clock = FakeClock()

    def script(poll: int, live: list[int]) -> list[News]:
        return [News(k, 3, finished=True, error="no memory" if k == 1 else None) for k in live]

    outcome = closed_loop(ScriptedPeer(clock, script), items(4), 2, clock)
    metrics = outcome.metrics()
    assert (metrics["done"], metrics["errors"]) == (3, 1)
    assert [s.error for s in outcome.errors] == ["no memory"]
    assert metrics["out_tok_s"] == pytest.approx(9 / 2)


@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_a_request_that_ends_with_another_number_of_tokens_is_an_error(tokens: int) -> None:
    clock = FakeClock()
    outcome = closed_loop(ScriptedPeer(clock, lambda poll, live: [News(k, tokens, finished=True) for k in live]), items(1), 1, clock)
    assert outcome.errors[0].error == f"{tokens} tokens came, 3 were asked for"


def test_a_peer_that_forgets_a_request_is_given_up_after_a_while() -> None:
    clock = FakeClock()
    outcome = closed_loop(ScriptedPeer(clock, lambda poll, live: []), items(3), 2, clock, patience_s=20.0)
    assert [s.error for s in outcome.served] == ["no news for 20 s", "no news for 20 s", "never sent: no news for 20 s"]
    assert outcome.metrics() == {"done": 0, "errors": 3}


def test_a_lost_peer_ends_every_request_with_an_error() -> None:
    clock = FakeClock()

    def script(poll: int, live: list[int]) -> list[News]:
        if poll == 2:
            raise ConnectionError("gone")
        return [News(live[0], 3, finished=True)]

    outcome = closed_loop(ScriptedPeer(clock, script), items(4), 2, clock)
    assert outcome.served[0].error is None
    assert [s.error for s in outcome.served[1:]] == ["the peer was lost: ConnectionError: gone"] * 2 + ["never sent: the peer was lost: ConnectionError: gone"]


@pytest.mark.parametrize(
    ("second", "message"), [(News(0, 1), "after its end"), (News(7, 1), "never sent"), (News(-1, 1), "never sent"), (News(1, -1), "-1 new")]
)
def test_what_no_honest_peer_says_is_an_accounting_error(second: News, message: str) -> None:
    clock = FakeClock()
    said = {1: [News(0, 3, finished=True)], 2: [second]}
    with pytest.raises(AccountingError, match=message):
        closed_loop(ScriptedPeer(clock, lambda poll, live: said[poll]), items(2), 2, clock)


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_exactly_once_whatever_the_peer_does(seed: int) -> None:
    rng, clock = random.Random(seed), FakeClock()
    got: dict[int, int] = {}

    def script(poll: int, live: list[int]) -> list[News]:
        news = []
        for key in live:
            tokens = rng.randint(0, 3 - got.get(key, 0))
            got[key] = got.get(key, 0) + tokens
            if rng.random() < 0.05:
                news.append(News(key, tokens, error="broken"))
            elif got[key] == 3:
                news.append(News(key, tokens, finished=True))
            elif tokens:
                news.append(News(key, tokens))
        return news

    count = rng.randint(0, 20)
    peer = ScriptedPeer(clock, script)
    if seed % 2:
        outcome = closed_loop(peer, items(count), rng.randint(1, 5), clock)
    else:
        outcome = open_loop(peer, items(count), poisson_arrivals(count, 2.0, seed), clock)
    assert [s.key for s in outcome.served] == list(range(count))
    assert all(s.ended is not None for s in outcome.served)
    metrics = outcome.metrics()
    assert metrics["done"] + metrics["errors"] == count
    assert sum(s.num_tokens for s in outcome.served) == sum(got.values())
    assert peer.live == []


def test_a_shared_prompt_is_warmed_by_one_short_request_first() -> None:
    clock = FakeClock()
    peer = SteadyPeer(clock)
    load = Workload("shared", 4, 4, Span(6, 6), Span(20, 20), shared_prompt=True)
    outcome = run_workload(peer, load, 50, clock)
    assert len(peer.prompts) == 5
    assert len(set(peer.prompts)) == 1
    assert outcome.metrics()["done"] == 4
    assert outcome.wall_s == 20.0  # the warming request is not in the figures


def test_a_failed_warming_request_is_not_passed_over() -> None:
    clock = FakeClock()
    load = Workload("shared", 4, 4, Span(6, 6), Span(20, 20), shared_prompt=True)
    with pytest.raises(RuntimeError, match="no memory"):
        run_workload(ScriptedPeer(clock, lambda poll, live: [News(k, 0, error="no memory") for k in live]), load, 50, clock)


def test_bad_arguments_are_refused() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="concurrency"):
        closed_loop(SteadyPeer(clock), items(1), 0, clock)
    for arrivals in ([0.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="ascending"):
            open_loop(SteadyPeer(clock), items(2), arrivals, clock)


def test_percentile_is_a_value_that_happened() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(100)], 0.99) == 99.0
    assert percentile([5.0], 0.99) == 5.0
