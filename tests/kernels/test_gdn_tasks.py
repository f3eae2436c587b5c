"""The lists of Gated DeltaNet's kernels: every token is in exactly one entry that computes it, and no step passes the bounds. Tiles are checked here too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.invariants.faults.switch import edited
from twinfer.kernels.gdn.tasks import CHUNK, LISTS, Counts, Lists, max_chunk_tasks, max_long_rows, plan_lists
from twinfer.kernels.gdn.tiles import HEAD_DIMS, LongTile, commit_tile, long_tile, single_tile

EDGES = st.sampled_from([0, 1, 2, 62, 63, 64, 65, 66, 127, 128, 129]) | st.integers(0, 400)
# (start, tokens, whether it is padding)
ROWS = st.lists(st.tuples(EDGES, st.sampled_from([1, 1, 2, 3, 5]) | EDGES, st.sampled_from([False, False, False, True])), max_size=6)
Rows = list[tuple[int, int, bool]]


def planned(rows: Rows, spare: int = 3) -> tuple[Lists, Counts]:
    """Into arrays that hold what the bounds say, `spare` places more and the lowest integer."""
    starts, lengths = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    slots = np.array([-1 if padding else 7 * i + 2 for i, (_, _, padding) in enumerate(rows)], np.int64)
    tokens = int(lengths.sum())
    sizes = (max_chunk_tasks(tokens, len(rows)), max_long_rows(tokens, len(rows)), len(rows), len(rows))
    lists = Lists(*(np.full((size + spare, width), np.iinfo(np.int32).min, np.int32) for size, width in zip(sizes, LISTS.values(), strict=True)))
    counts = plan_lists(starts, lengths, slots, lists)
    for name, size, number, array in zip(LISTS, sizes, counts, lists, strict=True):
        assert number <= size, f"{name}: {number} entries, the bound is {size}"
        assert (array[number:] == np.iinfo(np.int32).min).all(), f"{name}: written behind its entries"
    return lists, counts


def check(rows: Rows) -> None:
    lists, counts = planned(rows)
    first = np.cumsum([0] + [length for _, length, _ in rows])
    tasks, longs, singles, commits = (array[:number].tolist() for array, number in zip(lists, counts, strict=True))
    want_singles, want_commits, want_tasks = [], [], {}
    for i, (start, length, padding) in enumerate(rows):
        slot = 7 * i + 2
        if padding or length == 0:
            continue
        if length == 1:
            want_singles.append([first[i], start, slot])
            if (start + 1) % 64 == 0:
                want_commits.append([slot, start])
        else:
            for position in range(start, start + length):  # token by token: by slot and chunk, the step's token of row 0 and the rows
                want_tasks.setdefault((slot, position // 64), (int(first[i]) + position // 64 * 64 - start, []))[1].append(position % 64)
    assert singles == want_singles
    assert commits == want_commits
    listed = {}
    for task, token, begin, end, slot, anchor in longs:
        assert anchor % 64 == 0
        for i in range(-(-end // 64)):
            at, its_slot, its_begin, its_end = tasks[task + i]
            assert (at, its_slot) == (token + 64 * i, slot)
            assert (its_begin, its_end) == (begin if i == 0 else 0, min(64, end - 64 * i))
            listed[slot, anchor // 64 + i] = at, list(range(its_begin, its_end))
    assert listed == want_tasks
    assert len(tasks) == len(want_tasks), "a task belongs to two rows, or to none"
    chunks = [-(-end // 64) for _, _, _, end, _, _ in longs]
    assert chunks == sorted(chunks, reverse=True), "the longest come first"


@settings(max_examples=examples(150), derandomize=repeatable(), deadline=None, database=None)
@given(rows=ROWS)
def test_every_token_is_computed_once_within_the_bounds(rows: Rows) -> None:
    check(rows)


def test_the_bound_is_reached() -> None:
    """By rows of two tokens over the end of a chunk, and by one long row that meets as many chunks as it can."""
    assert planned([(63, 2, False)] * 5)[1].tasks == max_chunk_tasks(10, 5) == 10
    for tokens in (66, 130, 194):
        assert planned([(63, tokens, False)])[1].tasks == max_chunk_tasks(tokens, 1) == tokens // 64 + 2 - (tokens % 64 < 2)
    assert max_chunk_tasks(0, 9) == max_long_rows(0, 9) == 0
    assert max_chunk_tasks(1, 9) == max_long_rows(1, 9) == 0


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    lists = Lists(*(np.zeros((1, width), np.int32) for width in LISTS.values()))
    for rows, told in (([(63, 2)], "gdn_tasks: 2 entries in a list of 1"), ([(0, 1)] * 3, "gdn_singles: 3 entries in a list of 1"),
                       ([(0, 2)] * 2, "gdn_tasks: 2"), ([(63, 1), (63, 1)], "gdn_singles: 2")):  # fmt: skip
        starts, lengths = (np.array([row[i] for row in rows]) for i in (0, 1))
        with pytest.raises(ValueError, match=told):
            plan_lists(starts, lengths, np.arange(len(rows)), lists)
        assert not any(array.any() for array in lists)


_PLAN, _BOUND = "twinfer.kernels.gdn.tasks:plan_lists", "twinfer.kernels.gdn.tasks:max_chunk_tasks"
MUTANTS = {
    "padding listed": (_PLAN, "single = np.flatnonzero((slots >= 0) & (lengths == 1))", "single = np.flatnonzero(lengths == 1)"),
    "chunks from the row's start": (_PLAN, "begin = starts[long] % CHUNK", "begin = starts[long] * 0"),
    "a commit one token late": (_PLAN, "CHUNK == CHUNK - 1]", "CHUNK == 0]"),
    "the first task by row": (_PLAN, "np.cumsum(chunks) - chunks\n", "np.arange(len(chunks))\n"),
    "a tail forgotten": (_PLAN, "(begin + lengths[long] - 1) // CHUNK + 1", "np.maximum((begin + lengths[long]) // CHUNK, 1)"),
    "shortest first": (_PLAN, "np.argsort(-chunks", "np.argsort(chunks"),
    "a row meets one chunk less": (_BOUND, "(2 * CHUNK - 2) * longs", "(CHUNK - 1) * longs"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_list_is_found(mutant: str) -> None:
    rows: list[Rows] = [[(63, 2, False), (0, 1, True), (63, 1, False), (0, 130, False), (64, 1, False)], [(63, 2, False)], [(0, 64, False), (5, 200, False)]]
    for each in rows:
        check(each)
    place, old, new = MUTANTS[mutant]
    with edited(place, old, new)(), pytest.raises((AssertionError, ValueError, IndexError)):
        [check(each) for each in rows]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0), None])
def test_tiles_divide_every_head_dim(capability: tuple[int, int] | None) -> None:
    for key_dim in HEAD_DIMS:
        for value_dim in HEAD_DIMS:
            single = [single_tile(capability, 2, key_dim, value_dim, rows) for rows in (0, 1, 7, 8, 127, 128, 1000)]
            commit, long = commit_tile(capability, 2, key_dim, value_dim), long_tile(capability, 2, key_dim, value_dim)
            assert all(value_dim % tile.bv == 0 and value_dim % tile.second_bv == 0 and key_dim % tile.bk == 0 for tile in single)
            assert value_dim % commit.bv == 0 and key_dim % commit.bk == 0 and value_dim % long.bv == 0


def test_what_no_tile_serves_is_refused() -> None:
    for tile in (long_tile, commit_tile):
        with pytest.raises(ValueError, match="value_head_dim 24: Gated DeltaNet's kernels need one of"):
            tile((9, 0), 2, 128, 24)
    with pytest.raises(ValueError, match="key_head_dim 256"):
        single_tile((9, 0), 2, 256, 128, 1)
    with pytest.raises(ValueError, match=r"float32 needs 106 KiB of shared memory a block, a device of 8\.6 has 99"):
        long_tile((8, 6), 4, 128, 128)
    with pytest.raises(ValueError, match="stages 1: fewer than 2 computed wrong values"):
        LongTile(16, 4, 4, 1)
    assert CHUNK == 64
