"""Log probability kernels against the reference's fp64 ones: to 1e-6, ids exactly; not tokens."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budget import examples, repeatable
from tests.kernels.guard import same_bits
from tests.kernels.test_sampling import CUT_UP, WHOLE, poisoned
from twinfer.kernels.sampling.sampler import MAX_LOGPROBS, logprobs
from twinfer.kernels.sampling.tiles import Tiles
from twinfer.reference import sampler as reference

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
SETTINGS = settings(max_examples=examples(25 if DEVICE == "cpu" else 300), deadline=None, derandomize=repeatable(), phases=(Phase.explicit, Phase.generate))
CLOSE = 1e-6


def run(
    logits: Tensor, targets: list[int], num_top: int, tiles: Tiles = WHOLE, rows: list[int] | None = None, asked: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, top_ids, top_logprobs) on the CPU; every position asks unless `asked` says otherwise."""
    n = len(logits)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    logprob = torch.full((n,), -7.0, dtype=torch.float64, device=DEVICE)
    top_ids = torch.full((n, num_top), -7, dtype=torch.int32, device=DEVICE)
    top_logprobs = torch.full((n, num_top), -7.0, dtype=torch.float64, device=DEVICE)
    scratch = poisoned(n, logits.shape[1], tiles)
    rows, asked = list(range(n)) if rows is None else rows, [num_top] * n if asked is None else asked
    logprobs(logits.to(DEVICE), ints(rows), ints(asked), ints(targets), logprob, top_ids, top_logprobs, scratch, tiles)
    return logprob.cpu(), top_ids.cpu(), top_logprobs.cpu()


def compare(logits: Tensor, targets: list[int], got: tuple[Tensor, Tensor, Tensor]) -> None:
    want = reference.logprobs(logits, np.array(targets), got[1].shape[1])
    assert np.array_equal(got[1].numpy(), want.top_ids)
    for ours, theirs in ((got[0], want.logprob), (got[2], want.top_logprobs)):
        finite = np.isfinite(theirs)
        assert np.array_equal(ours.numpy()[~finite], theirs[~finite])
        assert np.abs(ours.numpy()[finite] - theirs[finite]).max(initial=0.0) < CLOSE


@SETTINGS
@given(
    seed=st.integers(0, 10**6),
    size=st.one_of(st.integers(1, 70), st.sampled_from([128, 255, 700])),
    kind=st.sampled_from(["normal", "wide", "ties", "equal", "bans"]),
    num_top=st.sampled_from([0, 1, 5, 20, MAX_LOGPROBS]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_equal_the_references(seed: int, size: int, kind: str, num_top: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(seed)
    ties = random.integers(-2, 3, (2, size)) * 1.0
    values = {
        "normal": random.normal(size=(2, size)) * 3,
        "wide": random.normal(size=(2, size)) * 100,
        "ties": ties,
        "equal": np.full((2, size), -4.5),
        "bans": np.where((random.random((2, size)) < 0.5) & (np.arange(size) > 0), -np.inf, ties),
    }[kind]
    logits = torch.from_numpy(values).to(dtype)
    targets = random.integers(0, size, 2).tolist()
    compare(logits, targets, run(logits, targets, min(num_top, size)))


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_a_large_vocabulary(spread: float) -> None:
    """Of 60001 tokens: flat, where the sum is made of small terms, as well as peaked."""
    logits = torch.randn(1, 60001, generator=torch.Generator().manual_seed(1)) * spread
    logits[0, 777] = 12.0
    tiles = replace(WHOLE, chunk=16384)
    compare(logits, [60000], run(logits, [60000], 3, tiles))


def test_tiles_and_neighbours_do_not_show() -> None:
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(2)) * 4
    together = run(logits, [3, 149, 0], 4)
    assert all(same_bits(a, b) for a, b in zip(together, run(logits, [3, 149, 0], 4, CUT_UP), strict=True))
    for i, target in enumerate([3, 149, 0]):
        alone = run(logits[[i]], [target], 4)
        assert all(same_bits(a[[i]], b) for a, b in zip(together, alone, strict=True))


def test_only_positions_whose_row_asks_are_written() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3))
    logprob, ids, best = run(logits, [1, 2, 3, 4], 2, rows=[1, -1, 0, 1], asked=[-1, 0])
    compare(logits[[0, 3]], [1, 4], (logprob[[0, 3]], ids[[0, 3]], best[[0, 3]]))
    assert logprob[[1, 2]].tolist() == [-7.0, -7.0]
    assert ids[[1, 2]].tolist() == [[-7, -7]] * 2
    assert best[[1, 2]].tolist() == [[-7.0, -7.0]] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's arithmetic on what is not a number
def test_a_position_that_has_no_distribution_is_nan_and_the_others_are_not() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(4))
    clean = run(logits, [1, 2, 3, 4, 5], 2)
    logits[0, 9], logits[2, 0], logits[4] = torch.nan, torch.inf, -torch.inf
    got = run(logits, [1, 2, 3, 4, 5], 2)
    want = reference.logprobs(logits, np.array([1, 2, 3, 4, 5]), 2)
    assert got[0].isnan().tolist() == np.isnan(want.logprob).tolist() == [True, False, True, False, True]
    assert got[2].isnan().all(dim=1).tolist() == [True, False, True, False, True]
    assert all(same_bits(a[[1, 3]], b[[1, 3]]) for a, b in zip(got, clean, strict=True))


def test_a_target_outside_the_vocabulary_has_no_probability() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(5))
    assert run(logits, [30, -1], 0)[0].isnan().tolist() == [True, True]


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4"):
        run(torch.zeros(1, 4), [0], 5)
    with pytest.raises(ValueError, match=f"at most {MAX_LOGPROBS}"):
        run(torch.zeros(1, 400), [0], MAX_LOGPROBS + 1)
