"""The second outage (https://github.com/Sandermage/genesis-vllm-patches/issues/33): a mixed step above the size of the profiling forward. Not a test.

A buffer of the step's tokens was sized at the cap of the memory-profiling forward. Each request's chunk was clamped below the cap, too; but decode rows
and prefills that are scheduled together add up. Here prompts join running decode rows so that the step has exactly so many tokens between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.outages.replay import Make, Replay, make_reference
from twinfer.limits import Limits, ceil_div


@dataclass(frozen=True, slots=True)
class Traffic:
    """`num_decoding` rows of one token; prompts of `prompts` tokens join them in one step. `cap`: of the warm-up forward."""

    num_decoding: int
    prompts: tuple[int, ...]
    cap: int
    max_step_tokens: int
    page_size: int

    @property
    def step_tokens(self) -> int:
        """Of the step in which they meet."""
        return self.num_decoding + sum(self.prompts)

    @property
    def limits(self) -> Limits:
        rows = self.num_decoding + len(self.prompts)
        context = max(self.prompts) + 8 + len(self.prompts)
        return Limits(
            max_batch=rows, max_step_tokens=self.max_step_tokens, max_chunk_tokens=self.cap, warmup_tokens=self.cap, max_context=context,
            max_step_context=rows * context, max_logit_tokens=min(256, rows), page_size=self.page_size,
            num_pages=rows * ceil_div(context, self.page_size),
        )  # fmt: skip

    def prompt(self, which: int) -> list[int]:
        return [(11 * i + which) % 200 for i in range(self.prompts[which])]


TINY = Traffic(num_decoding=2, prompts=(4, 3), cap=6, max_step_tokens=12, page_size=4)
FULL = Traffic(num_decoding=32, prompts=(2752, 2752), cap=4096, max_step_tokens=8192, page_size=16)


def _decoding(traffic: Traffic, make: Make) -> Replay:
    """An engine whose `num_decoding` requests have their first token."""
    replay = Replay(make(traffic.limits))
    for i in range(traffic.num_decoding):
        replay.add([1 + i], 1 + len(traffic.prompts))
    replay.step()
    assert all(len(events) == 1 for events in replay.events.values())
    return replay


def together(traffic: Traffic, make: Make) -> Replay:
    """The outage: all prompts arrive between two steps."""
    replay = _decoding(traffic, make)
    for which in range(len(traffic.prompts)):
        replay.add(traffic.prompt(which), 1)
    replay.drain()
    return replay


def one_by_one(traffic: Traffic, make: Make) -> Replay:
    """The control: each prompt joins the decode rows in a step of its own, as whoever tries the longest prompt does."""
    replay = _decoding(traffic, make)
    for which in range(len(traffic.prompts)):
        replay.add(traffic.prompt(which), 1)
        replay.step()
    replay.drain()
    return replay


def check_in_band(replay: Replay, traffic: Traffic) -> None:
    """The replay is worth something only if a step was between the cap and the budget, of decode rows and prefills, none of them above the cap."""
    band = [plan for plan in replay.plans if traffic.cap < plan.num_tokens <= traffic.max_step_tokens]
    assert [plan.num_tokens for plan in band] == [traffic.step_tokens], f"steps of {[plan.num_tokens for plan in replay.plans]} tokens"
    (plan,) = band
    assert plan.length.tolist() == [1] * traffic.num_decoding + list(traffic.prompts)
    assert plan.length.max() <= traffic.cap


def check(traffic: Traffic, make: Make) -> None:
    """Green with the right bound."""
    replay = together(traffic, make)
    try:
        replay.check_all_completed()
        check_in_band(replay, traffic)
        replay.check_engine_is_well()
    finally:
        replay.engine.close()


def gate() -> None:
    check(TINY, make_reference)
