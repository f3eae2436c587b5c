"""Tiles and schedules of paged attention: tiles fit their devices, and a SPREAD launch fits what is set aside for it. No kernel runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from twinfer.invariants.symbols import ENOUGH_PROGRAMS
from twinfer.kernels.attention.schedule import num_programs, spread, spread_rows
from twinfer.kernels.attention.tasks import count_tasks, max_places, max_tasks
from twinfer.kernels.attention.tiles import BN, CAPABILITIES, HEAD_DIMS, ITEMSIZE, Tile, shared_bound, shared_limit, tile, tile_tokens


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("is_spread", [False, True])
def test_every_tile_fits_its_device(capability: tuple[int, int], dtype: str, d: int, is_spread: bool) -> None:
    for group in (1, 2, 5, 8, 16):
        found = tile(capability, is_spread, dtype, d, group)
        assert shared_bound(found, capability, ITEMSIZE[dtype], d) <= shared_limit(capability)
        assert tile_tokens(found, group) >= 1
        assert found.rows >= 16  # the least that a dot takes
        assert found.rows & (found.rows - 1) == 0


# Bytes that Triton 3.7.1 asked for, compiled for the device.
@pytest.mark.parametrize(
    ("capability", "found", "dtype", "d", "seen"),
    [
        ((9, 0), Tile(16, 4, 3), "bfloat16", 64, 36864),
        ((9, 0), Tile(16, 4, 3), "bfloat16", 128, 71680),
        ((9, 0), Tile(16, 4, 3), "bfloat16", 256, 141312),
        ((9, 0), Tile(64, 4, 3), "bfloat16", 128, 115712),
        ((9, 0), Tile(64, 4, 2), "bfloat16", 128, 82944),
        ((9, 0), Tile(64, 8, 3), "bfloat16", 256, 230400),
        ((9, 0), Tile(32, 8, 1), "float32", 256, 110592),
        ((9, 0), Tile(16, 8, 2), "float32", 256, 155648),
        ((8, 6), Tile(64, 4, 2), "bfloat16", 128, 57344),
        ((8, 6), Tile(16, 8, 1), "float32", 256, 90112),
        ((12, 0), Tile(16, 4, 2), "bfloat16", 128, 38912),
    ],
)
def test_the_bound_on_shared_memory_holds_and_is_close(capability: tuple[int, int], found: Tile, dtype: str, d: int, seen: int) -> None:
    bound = shared_bound(found, capability, ITEMSIZE[dtype], d)
    assert seen <= bound <= 1.2 * seen


def test_what_has_no_tile_is_refused() -> None:
    for arguments, message in (
        (((7, 5), True, "bfloat16", 128, 4), "compute capability 8.0"),
        (((9, 0), True, "bfloat16", 96, 4), "head_dim 96"),
        (((9, 0), True, "float64", 128, 4), "float64"),
        (((8, 6), False, "float32", 256, 32), "shared memory"),
        (((12, 1), False, "bfloat16", 256, 128), "shared memory"),
    ):
        with pytest.raises(ValueError, match=message):
            tile(*arguments)


KV_HEADS = st.sampled_from([1, 2, 4, 8, 16])
PAGES = st.sampled_from([1, 16, 48, 64, 128, 256])
TILE_TOKENS = st.sampled_from([1, 2, 4, 16])


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 900)), min_size=1, max_size=20), KV_HEADS, PAGES, TILE_TOKENS, st.integers(1, 5), st.integers(0, 4)
)
def test_spread_fits_its_workspace(
    rows: list[tuple[int, int]], num_kv_heads: int, page_size: int, tile_tokens: int, decode_tokens: int, spare: int
) -> None:
    """Sized by limits that just allow the step, for spread_rows() rows of decode_tokens, as the executor does."""
    lengths = np.array([n for n, _ in rows], np.int32)
    contexts = lengths + np.array([before for _, before in rows], np.int32)
    most = spread_rows(len(rows) + spare, num_kv_heads, page_size, decode_tokens, tile_tokens)
    seen = min(int(contexts[lengths > 0].sum()), most * int(contexts.max()))
    tasks = max_tasks(most, most * decode_tokens, seen, decode_tokens, tile_tokens, True)
    places = max_places(most, seen, decode_tokens)
    if spread(lengths, contexts, num_kv_heads, page_size, decode_tokens, tile_tokens, tasks, places):
        number, used = count_tasks(lengths, contexts, tile_tokens, True)
        assert number <= tasks
        assert used <= places


@given(st.integers(1, 300), KV_HEADS, PAGES, TILE_TOKENS, st.integers(1, 5), st.integers(1, 5000))
def test_a_graph_and_an_eager_step_of_decode_rows_agree(
    rows: int, num_kv_heads: int, page_size: int, tile_tokens: int, decode_tokens: int, context: int
) -> None:
    """Whatever the contexts: a graph is captured before they are known."""
    assume(context >= decode_tokens)
    lengths, contexts = np.full(rows, decode_tokens), np.full(rows, context)
    captured = rows <= spread_rows(300, num_kv_heads, page_size, decode_tokens, tile_tokens)
    assert spread(lengths, contexts, num_kv_heads, page_size, decode_tokens, tile_tokens, 0, 0) == captured


def test_the_decisions_measured_on_an_h200() -> None:
    """K = 8, tiles of 4 tokens: SPREAD at batch 8, SERIAL at 16; SPREAD at any batch with small pages; a whole prefill is SERIAL."""

    def decides(rows: int, length: int, context: int, page_size: int) -> bool:
        return spread(np.full(rows, length), np.full(rows, context), 8, page_size, 1, 4, 10_000, 10_000)

    assert decides(1, 1, 8192, 64)
    assert decides(8, 1, 1024, 64)
    assert not decides(16, 1, 1024, 64)
    assert not decides(256, 1, 1024, 64)
    assert decides(64, 1, 2048, 16)
    assert decides(64, 1, 2048, 1)
    assert not decides(1, 8192, 8192, 64)
    assert not decides(1, 8192, 8192, 1)
    assert decides(1, 16, 3000, 64)  # a short chunk behind a long prefix: four tiles would use 32 programs
    assert not decides(1, 16, 3000 * 256, 64)  # its partials do not fit


def test_a_step_without_tokens_is_not_spread() -> None:
    assert not spread(np.zeros(3, int), np.zeros(3, int), 8, 64, 1, 4, 10, 10)
    assert not spread(np.zeros(0, int), np.zeros(0, int), 8, 64, 1, 4, 10, 10)


@given(st.integers(0, 10_000), KV_HEADS, st.integers(1, 200), st.booleans())
def test_programs(tasks: int, num_kv_heads: int, multiprocessors: int, is_spread: bool) -> None:
    number = num_programs(tasks, num_kv_heads, multiprocessors, is_spread)
    assert 1 <= number <= max(1, tasks)
    assert is_spread or number == max(1, tasks)
    if number < tasks:
        assert number * num_kv_heads >= multiprocessors


def test_few_rows_means_few_programs() -> None:
    assert spread_rows(256, 8, BN, 1, 4) == 15
    assert 15 * 8 < ENOUGH_PROGRAMS <= 16 * 8
    assert spread_rows(256, 8, BN, 5, 4) == 7
    assert spread_rows(256, 8, 16, 1, 4) == 256
    assert spread_rows(4, 8, BN, 1, 4) == 4
