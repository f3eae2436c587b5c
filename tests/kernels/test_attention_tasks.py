"""The task list of paged attention: what it covers, and that its bounds hold for every step within the limits. No kernel runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfer.kernels.attention.tasks import count_tasks, max_places, max_tasks, plan_tasks
from twinfer.kernels.attention.tiles import SPLIT

Rows = list[tuple[int, int]]  # tokens, tokens before them

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3 * SPLIT)), max_size=12)
TILE_TOKENS = st.sampled_from([1, 2, 4, 8, 16, 64])


def columns(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([n for n, _ in rows], np.int32)
    return lengths, lengths + np.array([before for _, before in rows], np.int32)


def planned(rows: Rows, tile_tokens: int, spread: bool) -> np.ndarray:
    lengths, contexts = columns(rows)
    number, places = count_tasks(lengths, contexts, tile_tokens, spread)
    out = np.full((number, 4), -1, np.int32)
    assert plan_tasks(lengths, contexts, tile_tokens, spread, out, places) == number
    return out


@given(ROWS, TILE_TOKENS, st.booleans())
def test_every_token_meets_every_key_once(rows: Rows, tile_tokens: int, spread: bool) -> None:
    met = [np.zeros((n, n + before), int) for n, before in rows]
    for row, first, split, _ in planned(rows, tile_tokens, spread):
        count = min(tile_tokens, rows[row][0] - first)
        end = rows[row][1] + first + count
        keys = slice(split * SPLIT, min(end, (split + 1) * SPLIT)) if spread else slice(0, end)
        assert keys.start < keys.stop, "a task without keys"
        met[row][first : first + count, keys] += 1
    for (_, before), matrix in zip(rows, met, strict=True):
        for token, keys in enumerate(matrix):
            assert (keys[: before + token + 1] == 1).all()
            assert keys.max() == 1


@given(ROWS, TILE_TOKENS)
def test_splits_of_a_tile_are_neighbours_and_partials_do_not_overlap(rows: Rows, tile_tokens: int) -> None:
    tasks = planned(rows, tile_tokens, spread=True)
    taken: set[int] = set()
    i = 0
    while i < len(tasks):
        row, first, split, place = tasks[i]
        count = min(tile_tokens, rows[row][0] - first)
        splits = -(-(rows[row][1] + first + count) // SPLIT)
        assert split == 0
        assert tasks[i : i + splits].tolist() == [[row, first, s, place] for s in range(splits)]
        own = set(range(place, place + count * splits)) if splits > 1 else set()
        assert not own & taken
        taken |= own
        i += splits
    lengths, contexts = columns(rows)
    assert taken == set(range(count_tasks(lengths, contexts, tile_tokens, True)[1]))


@given(ROWS, TILE_TOKENS)
def test_serial_lists_the_longest_first(rows: Rows, tile_tokens: int) -> None:
    ends = [rows[row][1] + min(first + tile_tokens, rows[row][0]) for row, first, _, _ in planned(rows, tile_tokens, spread=False)]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("spread", [False, True])
def test_too_small_a_list_is_refused_and_left_alone(spread: bool) -> None:
    lengths, contexts = columns([(5, 300), (1, 0)])
    number, places = count_tasks(lengths, contexts, 4, spread)
    out = np.full((number - 1, 4), -7, np.int32)
    with pytest.raises(ValueError, match=f"attention_tasks: {number} tasks in a list of {number - 1}"):
        plan_tasks(lengths, contexts, 4, spread, out, places)
    assert (out == -7).all()


def test_too_few_places_are_refused() -> None:
    lengths, contexts = columns([(5, 300), (1, 0)])
    number, places = count_tasks(lengths, contexts, 4, True)
    assert places == 5 * 2
    out = np.full((number, 4), -7, np.int32)
    with pytest.raises(ValueError, match="attention_partials: 10 partials in a workspace of 9"):
        plan_tasks(lengths, contexts, 4, True, out, 9)
    assert (out == -7).all()


@given(ROWS, TILE_TOKENS, st.booleans(), st.integers(0, 5))
def test_bounds_hold(rows: Rows, tile_tokens: int, spread: bool, padding: int) -> None:
    """Limits that just allow the step; padding rows, of one token and one key, come on top of its contexts."""
    lengths, contexts = columns(rows)
    tokens, seen, longest = int(lengths.sum()), int(contexts[lengths > 0].sum()), int(max([1, *lengths]))
    number, places = count_tasks(*columns([*rows, *[(1, 0)] * padding]), tile_tokens, spread)
    bucket = len(rows) + padding
    assert number <= max_tasks(bucket, tokens + padding, seen, longest, tile_tokens, spread)
    assert places <= (max_places(bucket, seen, longest) if spread else 0)


@given(st.integers(1, 8), st.integers(1, 6), TILE_TOKENS)
def test_bounds_are_met(rows: int, length: int, tile_tokens: int) -> None:
    """Steps that reach the bounds exactly: rows that have just begun a split, and rows that have just begun a tile."""
    lengths, contexts = columns([(length, 2 * SPLIT)] * rows)
    limits = rows, rows * length, int(contexts.sum()), length, tile_tokens
    number, places = count_tasks(lengths, contexts, tile_tokens, True)
    assert number == max_tasks(*limits, True)
    assert places == max_places(rows, int(contexts.sum()), length)
    lengths, contexts = columns([(length * tile_tokens + 1, 0)] * rows)
    limits = rows, int(lengths.sum()), int(contexts.sum()), length * tile_tokens + 1, tile_tokens
    assert count_tasks(lengths, contexts, tile_tokens, False)[0] == max_tasks(*limits, False)
