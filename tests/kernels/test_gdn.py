"""Gated DeltaNet's kernels: law 2 to the bit over every way to compute a sequence, and both against the recurrence. In float32 and float16, interpreted.

Dots run in order here (order.py), as a GPU's do. Every place of state, workspace and output is NaN until it is written; a result that rested on one would
be NaN. bench/probes/gdn.py has the same checks in bfloat16 for a GPU, with more tiles and longer sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch

from tests.kernels.guard import same_bits
from tests.kernels.order import sum_in_order
from twinfer.bench.probes.gdn_layer import HEADS, Heads, Inputs, Layer, Row, Tiles, expected, random_inputs
from twinfer.invariants.faults.switch import edited
from twinfer.kernels.gdn.tiles import LongTile, SingleTile

LENGTH = 134  # two full chunks and a few tokens more
WHOLE = Tiles(long=LongTile(16, 4, 4, 2))
FUSED = Tiles(single=SingleTile(True, 16, 16, 4, 2, 16))
TWO = Tiles(single=SingleTile(False, 16, 16, 4, 2, 16))
FORMS = {"fused": FUSED, "two launches": TWO}
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)


@cache
def inputs(seed: int, dtype: torch.dtype, heads: Heads = HEADS, length: int = LENGTH, hard: bool = False) -> Inputs:
    return random_inputs(length, heads, dtype, seed, hard)


def pieces(cuts: Sequence[int], length: int = LENGTH) -> Iterator[Row]:
    """Rows of sequence 0 between neighbouring cuts."""
    ends = [*cuts, length]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        yield 0, begin, end - begin


class Computed:
    """A sequence computed whole, in a layer of its own."""

    def __init__(self, x: Inputs) -> None:
        layer = Layer([x], out_dtype=torch.float32)
        self.out = layer.step([(0, 0, len(x.q))], WHOLE)[0]
        self.anchor = layer.anchor(0)


@cache
def whole(x_seed: int, dtype: torch.dtype, heads: Heads = HEADS, length: int = LENGTH, hard: bool = False) -> Computed:
    """Made once, inside a test that has its dots in order."""
    return Computed(inputs(x_seed, dtype, heads, length, hard))


def check_rows(steps: Sequence[Sequence[Row]], dtype: torch.dtype, tiles: Sequence[Tiles], heads: Heads = HEADS, sequences: int = 1) -> None:
    """Outputs of all rows, and the anchors of sequences that end at LENGTH, have the bits of the whole sequence's."""
    layer = Layer([inputs(i, dtype, heads) for i in range(sequences)], out_dtype=torch.float32)
    for number, rows in enumerate(steps):
        for (sequence, start, length), out in zip(rows, layer.step(rows, tiles[number % len(tiles)]), strict=True):
            if sequence < 0:
                assert out.isnan().all(), "a padding row was written"
                continue
            want = whole(sequence, dtype, heads).out[start : start + length]
            assert not want.isnan().any()
            assert same_bits(out, want), f"step {number}, row {start}+{length} of sequence {sequence}: {int((out != want).sum())} elements differ"
            if start + length == LENGTH:
                for got, right in zip(layer.anchor(sequence), whole(sequence, dtype, heads).anchor, strict=True):
                    assert same_bits(got, right), f"anchor of sequence {sequence}"


# Beside: the distance that was measured, relative Frobenius norm, the worst of outputs and anchors.
@pytest.mark.parametrize(
    ("dtype", "exact", "hard", "tolerance"),
    [
        (torch.float32, False, False, 1e-6),  # 2.0e-7
        (torch.float32, False, True, 5e-6),
        (torch.float16, False, False, 4e-4),  # 1.0e-4
        (torch.float16, True, True, 2e-5),
    ],
)
@pytest.mark.parametrize("heads", [Heads(), Heads(2, 2, 16, 32), Heads(1, 4, 16, 16)], ids=str)
def test_the_whole_sequence_against_the_recurrence(dtype: torch.dtype, exact: bool, hard: bool, tolerance: float, heads: Heads) -> None:
    x = random_inputs(LENGTH, heads, dtype, 5, hard)
    layer = Layer([x], exact=exact, out_dtype=torch.float32)
    want, anchor = expected(x)
    (out,) = layer.step([(0, 0, LENGTH)], WHOLE)
    for name, got, right in (("output", out, want), ("anchor", layer.anchor(0)[0], anchor)):
        error = float((got.double() - right).norm() / right.norm())
        assert error <= tolerance, f"{name}: {error:.1e}"


CUTS: list[tuple[int, ...]] = [(2,), (3,), (62,), (63,), (64,), (65,), (66,), (127,), (128,), (129,), (2, 5), (63, 66), (65, 127), (66, 70), (64, 128)]


@pytest.mark.parametrize(("cuts", "dtype"), [(cuts, torch.float16) for cuts in CUTS] + [((17, 33, 80, 81, 130), dtype) for dtype in DTYPES], ids=str)
def test_a_sequence_in_pieces(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also pieces of one token, in either form."""
    check_rows([[row] for row in pieces(cuts)], dtype, [FUSED, TWO])


@pytest.mark.parametrize(("form", "dtype"), [("fused", torch.float16), ("two launches", torch.float16), ("two launches", torch.float32)], ids=str)
def test_token_by_token(form: str, dtype: torch.dtype) -> None:
    """From position 0 over the first blocks, over each end of a chunk, and over what is left, behind longer pieces."""
    long = {20: 62, 66: 126}
    steps, at = [], 0
    while at < LENGTH:
        end = long.get(at, at + 1)
        steps.append([(0, at, end - at)])
        at = end
    check_rows(steps, dtype, [FORMS[form]])


@pytest.mark.parametrize("heads", [Heads(2, 2, 16, 16), Heads(1, 4, 16, 16), Heads(2, 4, 16, 32)], ids=str)
def test_rows_of_every_kind_in_one_step(heads: Heads) -> None:
    """Sequences at different positions: singles, commits, verify rows and chunks beside each other and padding, in slots of another order."""
    steps: list[list[Row]] = [
        [(0, 0, 63), (-1, 0, 1), (1, 0, 1), (2, 0, 70)],
        [(1, 1, 1), (0, 63, 1), (2, 70, 57), (-1, 0, 1)],
        [(2, 127, 1), (1, 2, 5), (0, 64, 1)],
        [(0, 65, 69), (1, 7, 121), (2, 128, 2), (-1, 0, 1), (-1, 0, 1)],
        [(2, 130, 1), (1, 128, 6)],
        [(2, 131, 3)],
    ]
    check_rows(steps, torch.float16, [FUSED, TWO], heads, sequences=3)


def test_strong_decay_does_not_overflow() -> None:
    """A chunk's sum of decay logarithms reaches -5000: exp of what lies between two tokens, never of a sum with its sign turned."""
    x = inputs(3, torch.float32, length=70)
    strong = Inputs(x.q, x.k, x.v, torch.full_like(x.log_decay, -80.0), x.beta)
    layer = Layer([strong], out_dtype=torch.float32)
    out = torch.cat([layer.step([row], FUSED)[0] for row in ((0, 0, 68), (0, 68, 1), (0, 69, 1))])
    want, _ = expected(strong)
    assert out.isfinite().all()
    assert float((out.double() - want).abs().max() / want.abs().max()) < 1e-5


def test_a_slot_is_taken_over_as_it_is() -> None:
    """Another sequence's rows stand in it: the second sequence's bits are those of a slot of its own."""
    for first in ([(0, 0, LENGTH)], [(0, 0, 30)]):
        layer = Layer([inputs(0, torch.float16), inputs(1, torch.float16)], out_dtype=torch.float32, slots=[1, 1])
        layer.step(first)
        outs = [layer.step([row], TWO)[0] for row in ((1, 0, 1), (1, 1, 1), (1, 2, 61), (1, 63, 1), (1, 64, 1), (1, 65, LENGTH - 65))]
        assert same_bits(torch.cat(outs), whole(1, torch.float16).out)


_CHUNKS, _SINGLES, _TASKS = "twinfer.kernels.gdn.chunks:", "twinfer.kernels.gdn.singles:", "twinfer.kernels.gdn.tasks:plan_lists"
PLAIN: list[list[Row]] = [[(0, 0, 50)], [(0, 50, 1)], [(0, 51, 12)], [(0, 63, 1)], [(0, 64, 1)], [(0, 65, 5)], [(0, 70, 57)], [(0, 127, 1)], [(0, 128, 6)]]
AT_ONCE: list[list[Row]] = [[(0, 0, LENGTH)]]
MUTANTS = {
    "chunks from the row's start": (_TASKS, "begin = starts[long] % CHUNK", "begin = starts[long] * 0"),
    "a commit one token early": (_TASKS, "CHUNK == CHUNK - 1]", "CHUNK == CHUNK - 2]"),
    "a commit forgotten": (_TASKS, "CHUNK == CHUNK - 1]", "CHUNK == CHUNK]"),
    "an old row of R computed again": (_CHUNKS + "value_side_kernel", "tl.where(old[:, None], old_high, r_high)", "r_high"),
    "a row too many taken from the state": (_CHUNKS + "value_side_kernel", "old = c < begin", "old = (c <= begin) & (begin > 0)"),
    "a decay too early": (_CHUNKS + "value_side_kernel", "tl.exp(whole - sums)", "tl.exp(whole)"),
    "the state decays after the write": (_SINGLES + "commit_kernel", "S, tl.exp(whole), SP", "S, 1.0, SP"),
    "decay sums from the step's start": (
        _CHUNKS + "decay_sums_kernel", "total = tl.where(i < begin, tl.load(STATE_SUMS + cached, mask=old, other=0.0), summed)", "total = summed",
    ),
    "the anchor read below position 64": (_SINGLES + "single_kernel", "anchored = position >= 64", "anchored = position >= 0"),
    "a stale row of T": (_SINGLES + "key_side", "written = before[:, None]", "written = (c <= i)[:, None]"),
    "x of the block before": (_SINGLES + "key_side", "(own_block + r < i)[:, None]", "(r < 16)[:, None]"),
    "the block's x not left": (_CHUNKS + "solve", "kept = (i < end)[:, None] & (end < b * 16 + 16)", "kept = (i < 0)[:, None] & (end < 0)"),
    "keys of the open chunk not left": (_CHUNKS + "leave_keys_kernel", "open_ = (i >=", "open_ = (i < 0) & (i >="),
    "the own term left out": (_SINGLES + "value_row", "diagonal * own", "0.0 * own"),
    "the first head's key": (_SINGLES + "single_kernel", "key_head = h // GROUP", "key_head = h * 0"),
    "no second piece of R": (_SINGLES + "value_row", "tl.store(R_LOW + i * DV + e, own_low)", "tl.store(R_LOW + i * DV + e, own_low * 0)"),
}  # fmt: skip


def check_steps(heads: Heads) -> None:
    check_rows(PLAIN, torch.float16, [FUSED, TWO], heads)
    check_rows(AT_ONCE, torch.float16, [FUSED], heads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(mutant: str) -> None:
    place, old, new = MUTANTS[mutant]
    heads = Heads(2, 2, 16, 16)
    whole(0, torch.float16, heads)  # the right one
    with edited(place, old, new)(), pytest.raises(AssertionError):
        check_steps(heads)


def test_the_steps_of_the_mutants_are_right_without_them() -> None:
    check_steps(Heads(2, 2, 16, 16))
