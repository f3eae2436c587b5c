"""Law 2 for paged attention: a token's bits do not depend on the launch that it is computed in. Not its distance from float64 (test_operations.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.kernels.guard import Guarded, same_bits
from tests.kernels.order import sum_in_order
from twinfer.kernels.attention import kernel
from twinfer.kernels.attention.tasks import count_tasks, plan_tasks
from twinfer.kernels.attention.tiles import Tile, tile_tokens

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.bfloat16)
NARROW, WIDE = Tile(16, 4, 2), Tile(64, 4, 2)
Row = tuple[int, int, int]  # sequence, position of the first token, tokens


@pytest.fixture(autouse=True)
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to test here is ours: see `sum_in_order`."""
    sum_in_order(monkeypatch)


@dataclass(frozen=True)
class Sequences:
    """Random q [n, H, d], k and v [n, K, d] of some sequences, and launches over any rows of them."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    page_size: int
    window: int = 0

    @classmethod
    def random(cls, lengths: tuple[int, ...], k: int, group: int, d: int, page_size: int, dtype: torch.dtype, window: int = 0) -> Sequences:
        g = torch.Generator().manual_seed(len(lengths) * 1000 + page_size)

        def draw(n: int, heads: int, gain: float) -> torch.Tensor:
            return (torch.randn(n, heads, d, generator=g) * gain).to(dtype).to(DEVICE)

        three = [[draw(n, heads, gain) for n in lengths] for heads, gain in ((k * group, 1.5), (k, 1.0), (k, 1.0))]
        return cls(*three, page_size, window)

    def caches(self, rows: list[Row]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """keys, values and page table: what some row sees, NaN everywhere else; page 0 is a row's that has just its first token, as padding's is."""
        pages = [-(-len(x) // self.page_size) for x in self.q]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(7)) + 1
        table = torch.zeros(len(self.q) + 1, max(pages) + 1, dtype=torch.int32)
        for i, n in enumerate(pages):
            table[i, :n] = order[sum(pages[:i]) :][:n]
        out = []
        for source in (self.k, self.v):
            _, heads, d = source[0].shape
            cache = torch.full((sum(pages) + 1, heads, self.page_size, d), torch.nan, dtype=source[0].dtype).transpose(1, 2)
            cache[0, 0] = 1.0
            for sequence, start, length in rows:
                if sequence < len(self.q):
                    first = max(0, start - self.window + 1) if self.window else 0
                    at = torch.arange(first, start + length)
                    cache[table[sequence].long()[at // self.page_size], at % self.page_size] = source[sequence][at].cpu()
            out.append(cache.to(DEVICE))
        return out, table.to(DEVICE)

    def workspace(self, places: int) -> list[Guarded]:
        """Partials and arrival counters of SPREAD."""
        (_, num_heads, d), num_kv_heads = self.q[0].shape, self.k[0].shape[1]
        partials = [torch.full((places, num_heads, *more), torch.nan, device=DEVICE) for more in ((d,), (), ())]
        return [Guarded(t) for t in (*partials, torch.zeros(places, num_kv_heads, dtype=torch.int32, device=DEVICE))]

    def launch(self, rows: list[Row], tile: Tile, spread: bool, programs: int | None = None, used: list[Guarded] | None = None) -> list[torch.Tensor]:
        """Results by row, [tokens, H, d] each. Sequence number len(q) stands for a padding row: the first slot of page 0. used: a workspace to go on with."""
        _, num_heads, d = self.q[0].shape
        group = num_heads // self.k[0].shape[1]
        (keys, values), table = self.caches(rows)
        padding = torch.ones_like(self.q[0][:1])
        q = torch.cat([padding if s == len(self.q) else self.q[s][a : a + n] for s, a, n in rows])
        lengths, contexts = np.array([n for _, _, n in rows]), np.array([a + n for _, a, n in rows])
        number, places = count_tasks(lengths, contexts, tile_tokens(tile, group), spread)
        tasks = np.full((number + 2, 4), np.iinfo(np.int32).min, np.int32)
        assert plan_tasks(lengths, contexts, tile_tokens(tile, group), spread, tasks, places) == number

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        out = Guarded(torch.full_like(q, torch.nan))
        workspace = used or self.workspace(places)
        kernel.attention(
            q,
            keys,
            values,
            table,
            ints([s for s, _, _ in rows]),
            ints([0, *lengths.cumsum().tolist()]),
            ints(contexts.tolist()),
            torch.from_numpy(tasks).to(DEVICE),
            ints([number]),
            *(w.tensor for w in workspace),
            out.tensor,
            scale=d**-0.5,
            window=self.window,
            spread=spread,
            tile=tile,
            num_programs=programs or number,
        )
        assert out.intact() and all(w.intact() for w in workspace), "written outside a tensor"
        assert not workspace[-1].tensor.any(), "counters must be left at zero"
        return list(out.tensor.split(lengths.tolist()))


def differing(got: torch.Tensor, want: torch.Tensor) -> str:
    return "" if same_bits(got, want) else f"{(got != want).sum()} of {got.numel()} elements differ"


@pytest.mark.parametrize(
    ("dtype", "page_size", "window"),
    [(DTYPES[0], 16, 0), (DTYPES[1], 64, 0), (DTYPES[1], 48, 15)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_law_2(dtype: torch.dtype, page_size: int, window: int) -> None:
    """A sequence whole, in chunks on and off the grids, its tokens alone and mixed with others, by both schedules."""
    sequences = Sequences.random((276, 37), 1, 2, 64, page_size, dtype, window)
    n, padding = 276, 2
    alone: list[Row] = [(0, p, 1) for p in (0, 63, 255, 256, 275)]
    short: list[Row] = [(0, p, 16) for p in (5, 64, 250, 260)]
    mixed = [(1, 0, 37), *alone, (1, 3, 1), (0, 100, 11), short[2], (padding, 0, 1), (padding, 0, 1)]
    whole = sequences.launch([(0, 0, n)], WIDE, spread=False)[0]
    assert whole.isfinite().all()
    launches: list[tuple[list[Row], Tile, bool]] = [([(0, 0, n)], NARROW, True), (mixed, WIDE, True), (mixed, NARROW, False)]
    for tile, spread in ((NARROW, True), (WIDE, False)):
        launches += [([(0, p, min(170, n - p))], tile, spread) for p in (0, 170)]
        launches += [([row], tile, spread) for row in (*short, alone[2], alone[4])] + [(mixed, tile, spread)]
    for rows, tile, spread in launches:
        for (sequence, start, length), got in zip(rows, sequences.launch(rows, tile, spread, programs=3), strict=True):
            if sequence == 0:
                assert not differing(got, whole[start : start + length]), f"{start}+{length} in {rows}, {tile}, {'SPREAD' if spread else 'SERIAL'}"


@pytest.mark.parametrize("group", [1, 5, 16])
def test_schedules_agree_for_any_group(group: int) -> None:
    sequences = Sequences.random((280, 3), 1, group, 64, 64, DTYPES[0])
    rows: list[Row] = [(0, 276, 4), (0, 60, 3), (1, 2, 1)]
    for spread, serial in zip(sequences.launch(rows, NARROW, True), sequences.launch(rows, WIDE, False), strict=True):
        assert spread.isfinite().all()
        assert not differing(spread, serial)


@pytest.mark.parametrize(("tile", "spread"), [(WIDE, False), (NARROW, True)])
def test_a_window_that_holds_the_context_changes_nothing(tile: Tile, spread: bool) -> None:
    """Windows mask every tile, where no window masks only those at the end."""
    got = [Sequences.random((300, 37), 1, 2, 64, 16, DTYPES[0], w).launch([(0, 270, 30), (1, 0, 37)], tile, spread) for w in (0, 300)]
    for plain, windowed in zip(*got, strict=True):
        assert not differing(windowed, plain)


def test_splits_behind_the_window_are_left_out() -> None:
    """By SPREAD from its fold, by SERIAL from its walk, which then begins within a split. Their partials are never written and NaN."""
    sequences = Sequences.random((600, 300), 1, 2, 64, 16, DTYPES[0], window=270)
    rows: list[Row] = [(0, 599, 1), (0, 530, 3), (1, 299, 1)]
    for spread, serial in zip(sequences.launch(rows, NARROW, True), sequences.launch(rows, WIDE, False), strict=True):
        assert spread.isfinite().all()
        assert not differing(spread, serial)


def test_a_used_workspace_is_as_good_as_new() -> None:
    """Replays of a graph find the partials of the replay before, and its counters at zero."""
    sequences = Sequences.random((300, 290), 1, 2, 64, 64, DTYPES[0])
    workspace = sequences.workspace(8)
    first: list[Row] = [(0, 299, 1), (1, 289, 1)]
    second: list[Row] = [(1, 260, 1), (0, 270, 2), (0, 3, 1)]
    for rows in (first, second, first):
        for got, want in zip(sequences.launch(rows, NARROW, True, used=workspace), sequences.launch(rows, NARROW, True), strict=True):
            assert not differing(got, want)


def test_more_programs_than_tasks() -> None:
    sequences = Sequences.random((300, 37), 1, 2, 64, 64, DTYPES[0])
    rows: list[Row] = [(0, 299, 1)]
    assert not differing(sequences.launch(rows, NARROW, True, programs=6)[0], sequences.launch(rows, NARROW, True)[0])


def test_another_split_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: the split is part of the arithmetic."""
    sequences = Sequences.random((300, 37), 1, 2, 64, 64, DTYPES[0])
    rows: list[Row] = [(0, 280, 20)]
    want = sequences.launch(rows, WIDE, False)[0]
    monkeypatch.setattr(kernel, "SPLIT", 128)
    got = sequences.launch(rows, WIDE, False)[0]
    assert differing(got, want)
    assert (got - want).abs().max() < 1e-5


def test_what_does_not_fit_is_refused() -> None:
    def call(d: int = 64, group: int = 2, strided: bool = False, transposed: bool = False) -> None:
        q = torch.zeros(1, group, d, device=DEVICE)
        if transposed:
            q = torch.zeros(group, 1, d, device=DEVICE).repeat(1, 2, 1).transpose(0, 1)[:1]
        keys = torch.zeros(2, 1, 64, d, device=DEVICE).transpose(1, 2)
        values = torch.zeros(2, 64, 1, 2 * d, device=DEVICE)[..., ::2] if strided else keys
        ints = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
        workspace = (torch.zeros(1, device=DEVICE),) * 3
        kernel.attention(
            q, keys, values, ints, ints[0], ints[0], ints[0], ints, ints[0], *workspace, ints, torch.zeros(1, group, d, device=DEVICE),
            scale=1.0, window=0, spread=False, tile=NARROW, num_programs=1,
        )  # fmt: skip

    call()
    for wrong, message in (({"d": 96}, "heads of 96"), ({"group": 17}, "17 query heads"), ({"strided": True}, "strides"), ({"transposed": True}, "contiguous")):
        with pytest.raises(ValueError, match=message):
            call(**wrong)  # type: ignore[arg-type]
