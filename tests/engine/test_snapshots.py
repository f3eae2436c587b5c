"""What a prefix hit is in a model that keeps states: which snapshots are taken, who finds them, which give way, and what is never found. Ghost executor.

Random traffic is test_snapshot_machine's; here each rule is shown by itself, with numbers.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from twinfer.engine.snapshots import SnapshotPool
from twinfer.errors import LawViolation, StepFailed
from twinfer.plan import StepPlan
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of
from .test_hits import cached, rows_of

VOCAB = 997
TEXT = tuple(random.Random(1).choices(range(VOCAB), k=400))
OTHER = tuple(random.Random(2).choices(range(VOCAB), k=400))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def engine(*, num_snapshots: int = 16, page_size: int = 16, num_pages: int | None = None, **given: int) -> GhostEngine:
    """For four requests of at most 400 tokens."""
    within = {"max_context": 400, "max_step_tokens": 200, "num_state_slots": 4, **given}
    return GhostEngine(limits(page_size=page_size, num_pages=num_pages or 1600 // page_size, num_snapshots=num_snapshots, **within), vocab_size=VOCAB)


def ask(asked: GhostEngine, prompt: tuple[int, ...], max_tokens: int = 2) -> int:
    """One request alone: its tokens are the solo run's. Returns how many of its prompt's were cached."""
    request = asked.add(Request(prompt, greedy(max_tokens)))
    events = drain(asked)
    assert tokens_of(events, request) == solo(prompt, max_tokens, vocab_size=VOCAB)
    assert at_baseline(asked.scheduler)
    return cached(events, request)


def lengths(asked: GhostEngine) -> list[int]:
    """Of all snapshots that are found."""
    pool = asked.scheduler.keeping.pool
    return sorted(int(pool.length[snapshot]) for snapshot in pool.keys().values())


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 128, 192])
@pytest.mark.parametrize("look_ahead", [0, 1, 2])
def test_the_same_prompt_hits_the_last_point_before_its_end(page_size: int, look_ahead: int) -> None:
    """Also one that ends just on a point of the grid: the point before it, since one token at least has to be computed."""
    grid = max(64, page_size)
    for length in (grid - 1, grid, grid + 1, 2 * grid - 1, 2 * grid):
        asked = engine(page_size=page_size, look_ahead=look_ahead, max_step_tokens=400)
        assert ask(asked, TEXT[:length], 1) == 0
        assert ask(asked, TEXT[:length], 1) == (length - 1) // grid * grid
        assert ask(asked, TEXT[: length + 1], 1) == length // grid * grid


def test_a_chunk_ends_where_a_snapshot_is_wanted_and_the_rest_is_the_next() -> None:
    asked = engine()
    rows = rows_of(asked)
    ask(asked, TEXT[:130], 3)
    ask(asked, (*TEXT[:128], *OTHER[:20]), 1)
    assert rows == {0: [(0, 128), (128, 2), (130, 1), (131, 1)], 1: [(128, 20)]}


def test_a_chunk_that_ends_for_a_snapshot_holds_up_nobody() -> None:
    """The decode row has a token in every step, and the step's tokens that a shortened chunk leaves go to the next prompt."""
    asked = engine(max_step_tokens=150, max_chunk_tokens=150)
    decoding = asked.add(Request(TEXT[:3], greedy(20)))
    asked.step()
    for prompt in (TEXT[10:80], OTHER[:90]):
        asked.add(Request(prompt, greedy(2)))
    rows = rows_of(asked)
    drain(asked)
    assert [len(rows[i]) for i in (0, 1, 2)] == [19, 3, 3]
    assert rows[1] == [(0, 64), (64, 6), (70, 1)]
    assert rows[2] == [(0, 64), (64, 26), (90, 1)]
    assert asked.num_steps < 22
    assert decoding == 0


def test_the_next_turn_hits_the_last_point_before_the_answers_end() -> None:
    """Whatever the answer's length: of its tokens all but the last are computed."""
    for max_tokens in (1, 60, 62, 63, 64, 65, 66, 67, 127, 128, 129, 130, 131, 132, 200):
        for look_ahead in (0, 1, 2):
            asked = engine(look_ahead=look_ahead)
            ask(asked, TEXT[:64], max_tokens)
            whole = (*TEXT[:64], *solo(TEXT[:64], max_tokens, vocab_size=VOCAB))
            assert ask(asked, (*whole, 5, 6)) == (len(whole) - 1) // 64 * 64, f"{max_tokens} tokens, {look_ahead} ahead"


def test_an_answer_that_ends_by_a_stop_token_leaves_its_last_point() -> None:
    """With look-ahead, the step behind its end is in flight when the end is read: what that one saves is of a token that was not given."""
    for end in range(60, 70):
        for look_ahead in (0, 1, 2):
            answer = solo(TEXT[:64], end, vocab_size=VOCAB)
            if answer[-1] in answer[:-1]:
                continue
            asked = engine(look_ahead=look_ahead)
            asked.executor.history = None  # rows behind the end hold tokens that the engine has dropped
            asked.add(Request(TEXT[:64], SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=(answer[-1],))))
            drain(asked)
            found = (64 + end - 1) // 64 * 64
            assert max(lengths(asked)) == found
            assert ask(asked, (*TEXT[:64], *answer, 9)) == found


def test_while_it_writes_a_sequence_keeps_its_newest_snapshot_only() -> None:
    """And that of its prompt, and one that somebody has found."""
    asked = engine()
    ask(asked, TEXT[:70], 200)
    assert lengths(asked) == [64, 256]
    asked = engine()
    request = asked.add(Request(TEXT[:70], greedy(200)))
    events = [event for _ in range(75) for event in asked.step()]
    answer = tokens_of(events, request)
    branch = asked.add(Request((*TEXT[:70], *answer[:60], 7), greedy(1)))
    events += drain(asked)
    assert cached(events, branch) == 128
    assert lengths(asked) == [64, 128, 256]


def test_the_third_prompt_of_a_common_beginning_hits_it() -> None:
    """The first knew nothing of the others; the second leaves its pages between two points, and a snapshot at the last of them before."""
    asked = engine()
    prompts = [(*TEXT[:200], *OTHER[100 * i : 100 * i + 100]) for i in range(3)]
    assert [ask(asked, prompt) for prompt in prompts] == [0, 0, 192]
    assert lengths(asked) == [192, 256, 256, 256]


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    """So a prompt that leaves it anywhere computes snapshot_interval tokens at most."""
    asked = engine(snapshot_interval=100)  # rounded up to the grid
    ask(asked, TEXT[:399], 1)
    assert lengths(asked) == [128, 256, 384]
    assert ask(asked, (*TEXT[:300], 1, 2)) == 256


def test_hits_need_pages_and_a_snapshot_of_one_length() -> None:
    """The pages without the snapshot, the snapshot without a page: neither hits there, and the longest length with both does."""
    asked = engine(snapshot_interval=64, page_size=64)
    ask(asked, TEXT[:300], 1)
    pool, prefix = asked.scheduler.keeping.pool, asked.scheduler.prefix
    assert lengths(asked) == [64, 128, 192, 256]
    keys = {int(pool.length[snapshot]): key for key, snapshot in pool.keys().items()}
    pool.forget(keys[256])
    assert prefix._page_of.get(keys[256]) is not None
    assert ask(asked, TEXT[:300], 1) == 192
    page = prefix._page_of[keys[192]]
    asked.scheduler._forget(page)
    asked.scheduler.pool._cached.pop(page)
    asked.scheduler.pool.sealed[page] = False
    asked.scheduler.pool._free.append(page)
    assert 192 not in lengths(asked), "a snapshot without its page can't be hit"
    assert ask(asked, TEXT[:300], 1) == 128


def test_pages_that_are_computed_again_take_the_place_of_those_that_nobody_holds() -> None:
    """Six prompts through a pool for less than three: of the one that comes back some pages are left, and their state is gone. It computes them anew, on
    pages of its own, and is found whole when it comes once more; no content is kept twice.
    """
    asked = engine(num_pages=48, num_snapshots=12)
    prompts = [tuple(random.Random(i).choices(range(VOCAB), k=257)) for i in range(6)]
    for i in (0, 1, 2, 3, 4, 5, 0, 3):
        assert ask(asked, prompts[i], 6) == 0
    assert ask(asked, prompts[5], 6) == 0
    assert ask(asked, prompts[5], 6) == 256
    assert len(asked.scheduler.prefix) == asked.scheduler.pool.num_cached


def test_an_evicted_page_takes_its_snapshot_with_it() -> None:
    asked = engine(num_pages=26)
    ask(asked, TEXT[:200], 1)
    assert lengths(asked) == [192]
    ask(asked, OTHER[:399], 1)
    assert lengths(asked) == [384]
    assert ask(asked, TEXT[:200], 1) == 0


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    asked = engine(num_snapshots=2)
    first, second, third = (TEXT[i : i + 70] for i in (0, 100, 200))
    assert [ask(asked, prompt, 1) for prompt in (first, second, first, third, first, second)] == [0, 0, 64, 0, 64, 0]
    assert asked.scheduler.keeping.pool.num_evictions == 2


def test_one_snapshot_is_enough_for_one_conversation() -> None:
    """Each turn hits the one before, as the newest takes the place of the last."""
    asked, history, known = engine(num_snapshots=1), TEXT[:70], 0
    for _ in range(4):
        assert ask(asked, history, 70) == known // 64 * 64
        known = len(history) + 70 - 1  # all but the last are computed
        history = (*history, *solo(history, 70, vocab_size=VOCAB), 3)
    assert len(lengths(asked)) == 1


def test_a_prompt_that_comes_while_the_first_still_runs_hits_as_soon_as_it_is_there() -> None:
    asked = engine()
    first = asked.add(Request(TEXT[:100], greedy(30)))
    rows = rows_of(asked)
    asked.step()  # 64 tokens, and the snapshot behind them
    second = asked.add(Request(TEXT[:100], greedy(3)))
    events = drain(asked)
    assert rows[1][0] == (64, 36)
    assert [tokens_of(events, r) for r in (first, second)] == [solo(TEXT[:100], n, vocab_size=VOCAB) for n in (30, 3)]


def test_samples_wait_for_the_first_ones_snapshot_and_share_it() -> None:
    asked = engine(max_step_tokens=40)
    rows = rows_of(asked)
    request = asked.add(Request(TEXT[:100], SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=5)))
    events = drain(asked)
    assert [rows[i][0][0] for i in range(3)] == [0, 64, 64]
    alone = engine(max_batch=1)
    again = alone.add(Request(TEXT[:100], SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=5)))
    expected = drain(alone)
    assert all(tokens_of(events, request, i) == tokens_of(expected, again, i) for i in range(3))


def test_preempted_sequences_go_on_from_the_longest_hit() -> None:
    """Two grow until the pool is empty, which is at 176 tokens each; the second comes back to the last point that it has passed."""
    asked = engine(num_pages=23, max_batch=2)
    rows = rows_of(asked)
    ids = [asked.add(Request(prompt, greedy(110))) for prompt in (TEXT[:100], OTHER[:100])]
    events = drain(asked)
    assert [tokens_of(events, r) for r in ids] == [solo(p, 110, vocab_size=VOCAB) for p in (TEXT[:100], OTHER[:100])]
    assert asked.scheduler.num_preemptions == 1
    starts = [start for start, _ in rows[1]]
    again = next(i for i in range(1, len(starts)) if starts[i] <= starts[i - 1])
    assert (starts[again - 1], starts[again]) == (175, 128)


def test_prompts_that_are_scored_and_engines_without_cache_neither_save_nor_restore() -> None:
    for cache, params in ((False, greedy(70)), (True, SamplingParams(temperature=0.0, max_tokens=70, prompt_logprobs=0))):
        asked = GhostEngine(limits(page_size=16, max_context=400, max_step_tokens=200, num_state_slots=4, num_snapshots=4), prefix_cache=cache)
        for _ in range(2):
            asked.add(Request(tuple(t % 3 for t in TEXT[:130]), params))
            assert {event.num_cached_tokens for event in drain(asked)} == {0}
        assert lengths(asked) == []


def test_nothing_of_a_failed_step_is_found() -> None:
    """Neither its pages nor the snapshot that it was to write; what was there before stays."""
    asked = engine(look_ahead=1)
    ask(asked, TEXT[:70], 1)

    def fail(plan: StepPlan) -> None:
        if (plan.start + plan.length == 128).any():
            raise StepFailed("injected")

    asked.executor.fail_on = fail
    asked.add(Request(TEXT[:130], greedy(3)))
    assert [event.finish_reason for event in drain(asked)] == [FinishReason.ERROR]
    assert lengths(asked) == [64]
    assert at_baseline(asked.scheduler)
    asked.executor.fail_on = None
    assert ask(asked, TEXT[:130], 3) == 64


def test_an_aborted_sequence_leaves_only_what_was_over() -> None:
    """Aborted while the step that saves is in flight: that snapshot is given back when the step is over, and is never found."""
    asked = engine(look_ahead=1)
    request = asked.add(Request(TEXT[:130], greedy(3)))
    for _ in range(2):
        asked.step()  # launches [0, 128) and [128, 130), collects the first
    assert lengths(asked) == [128]
    asked.abort(request)
    drain(asked)
    assert lengths(asked) == [128]
    asked = engine(look_ahead=2, max_step_tokens=64)
    request = asked.add(Request(TEXT[:130], greedy(3)))
    plan = asked._plan()
    assert plan is not None
    asked._launch(plan)
    plan = asked._plan()
    assert plan is not None
    assert plan.saves.size
    asked._launch(plan)
    asked.abort(request)
    assert asked.scheduler.keeping.pool.num_pinned == 1
    drain(asked)
    assert lengths(asked) == []
    assert at_baseline(asked.scheduler)


def test_a_lost_engine_forgets_all() -> None:
    asked = engine()
    ask(asked, TEXT[:70], 1)
    asked.scheduler.abandon()
    pool = asked.scheduler.keeping.pool
    assert lengths(asked) == []
    assert len(pool.free()) == pool.num_snapshots
    assert (pool.length == -1).all()
    assert not pool.written.any()


def test_a_refused_plan_gives_back_what_it_had_taken() -> None:
    """Planned a hundred times without a launch: one snapshot is taken, and the hit stays pinned once."""
    asked = engine(num_snapshots=2)
    ask(asked, TEXT[:70], 1)
    asked.add(Request(TEXT[:130], greedy(1)))
    for _ in range(100):
        plan = asked.scheduler.plan()
        assert plan is not None
        assert (plan.restores.shape, plan.saves.shape) == ((1, 2), (1, 2))
        assert asked.scheduler.keeping.pool.pins.tolist() == [1, 1]
    drain(asked)
    assert lengths(asked) == [64, 128]


def pool_of(num_snapshots: int) -> SnapshotPool:
    return SnapshotPool(num_snapshots, np.zeros(num_snapshots, np.int32), np.zeros(num_snapshots, np.bool_), np.zeros(num_snapshots, np.int32))


def test_a_pinned_snapshot_is_neither_evicted_nor_freed() -> None:
    pool = pool_of(2)
    for key in (b"a", b"b"):
        pool.keep(pool.take(64), key, passing=False)
    pool.pin(pool.find(b"a"))
    pool.pin(pool.find(b"a"))
    taken = pool.take(128)
    assert (pool.find(b"a"), pool.find(b"b")) == (0, -1)
    assert pool.take(64) == -1, "both are pinned"
    pool.forget(b"a")
    assert pool.find(b"a") == -1
    pool.unpin(0)
    assert pool.free() == (), "one reader is left"
    pool.unpin(0)
    assert pool.free() == (0,)
    pool.unpin(taken)
    assert sorted(pool.free()) == [0, 1]
    for wrong in (lambda: pool.unpin(0), lambda: pool.pin(0)):
        with pytest.raises(LawViolation):
            wrong()


def test_the_first_of_two_equal_snapshots_stays() -> None:
    pool = pool_of(3)
    one, two = pool.take(64), pool.take(64)
    pool.keep(one, b"a", passing=True)
    pool.keep(two, b"a", passing=False)
    assert pool.find(b"a") == one
    assert two in pool.free()
    pool.pass_by(b"a")
    assert pool.find(b"a") == one, "it is a prompt's end too"
