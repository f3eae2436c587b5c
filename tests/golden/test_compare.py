"""The comparison itself, and the wrong logits that it must not let through."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples
from tests.golden.conftest import ROOT, rebuilt_logits
from twinfer.golden.compare import (
    FP64,
    Comparison,
    MismatchedLogits,
    NothingCompared,
    Scores,
    Tolerance,
    compare,
    compare_all,
    compare_boundaries,
    compare_scores,
    pool,
)
from twinfer.golden.manifest import Case, Goldens, load_goldens

CASE = "tragedy_257"
LOOSE = Tolerance("loose", max=1e-9)


@pytest.fixture(scope="module")
def case(micro: Goldens) -> Case:
    return micro.cases[CASE]


@pytest.fixture(scope="module")
def right(case: Case) -> np.ndarray:
    """[T, V] float64, what a right engine would give."""
    logits, positions = rebuilt_logits(case)
    assert np.array_equal(positions, np.arange(len(case.token_ids)))
    return logits


def test_right_logits_pass(case: Case, right: np.ndarray) -> None:
    result = compare(case, right, tolerance=LOOSE)
    assert result.passed
    assert result.num_positions == len(case.token_ids) == 257
    assert result.max < 1e-9
    assert result.regret == 0.0


def test_torch_tensor_of_any_float_dtype(case: Case, right: np.ndarray) -> None:
    exact = compare(case, torch.from_numpy(right), tolerance=LOOSE)
    rounded = compare(case, torch.from_numpy(right).bfloat16())
    assert exact.passed
    assert 1e-3 < rounded.max < 0.5


@pytest.mark.parametrize("where", [(0, 0), (128, 255), (256, 31)])
def test_one_nan_fails(case: Case, right: np.ndarray, where: tuple[int, int]) -> None:
    wrong = right.copy()
    wrong[where] = np.nan
    for tolerance in (FP64, Tolerance("unlimited")):
        result = compare(case, wrong, tolerance=tolerance)
        assert not result.passed
        assert np.isnan(result.max)
        assert np.isnan(result.regret)
        assert result.worst_position == where[0]
    with pytest.raises(AssertionError, match="FAILED"):
        result.check()


def test_nan_in_any_case_fails_the_whole(micro: Goldens) -> None:
    cases = [micro.cases["tragedy_15"], micro.cases["tragedy_16"], micro.cases["tragedy_17"]]

    def forward(token_ids: np.ndarray) -> np.ndarray:
        logits = rebuilt_logits(cases[len(token_ids) - 15])[0]
        if len(token_ids) == 16:
            logits[3] = np.nan
        return logits

    result = compare_all(cases, forward, tolerance=LOOSE)
    assert not result.passed
    assert (result.num_positions, result.worst_case, result.worst_position) == (48, "tragedy_16", 3)


def test_infinity_fails(case: Case, right: np.ndarray) -> None:
    wrong = right.copy()
    wrong[5, 7] = np.inf
    assert not compare(case, wrong).passed


def test_zero_positions_raise(case: Case, micro: Goldens) -> None:
    empty = np.empty((0, case.fp64.vocab_size))
    with pytest.raises(NothingCompared):
        compare(case, empty, [])
    unstored = [100]  # between the ranges that hold fp32
    assert 100 not in case.fp32.positions
    with pytest.raises(NothingCompared):
        compare(case, np.zeros((1, 256)), unstored, against="fp32")
    with pytest.raises(NothingCompared):
        compare_all([], lambda token_ids: token_ids)
    with pytest.raises(NothingCompared):
        compare_boundaries(micro.cases["tragedy_1"].before("none", 0), np.empty((0, 4, 64)))


def test_shifted_positions_fail(case: Case, right: np.ndarray) -> None:
    result = compare(case, np.roll(right, 1, axis=0), tolerance=Tolerance("bf16-like", mean=0.1))
    assert not result.passed
    assert result.mean > 1.0
    assert result.regret > 1.0


def test_another_model_fails(case: Case) -> None:
    other = np.random.default_rng(0).normal(size=(len(case.token_ids), 256))
    assert not compare(case, other, tolerance=Tolerance("bf16-like", regret=0.5)).passed


def test_another_vocabulary_is_refused(case: Case) -> None:
    foreign = load_goldens(ROOT / "qwen3").cases[CASE]
    with pytest.raises(MismatchedLogits, match="2048"):
        compare(case, rebuilt_logits(foreign)[0])


def test_constant_offset_is_seen(case: Case, right: np.ndarray) -> None:
    result = compare(case, right + 0.25, tolerance=LOOSE)
    assert not result.passed
    assert result.logsumexp == pytest.approx(0.25)
    assert result.mean < 1e-9  # logprobs alone do not see it


def test_regret_outside_the_top_k(case: Case, right: np.ndarray) -> None:
    wrong = right.copy()
    outside = next(token for token in range(256) if token not in case.fp64.top_ids[9])
    wrong[9, outside] = right[9].max() + 1
    golden = case.fp64.logprobs[9]
    assert compare(case, wrong).regret == pytest.approx(golden[0] - golden[-1])


def test_bad_shapes_dtypes_positions(case: Case, right: np.ndarray) -> None:
    with pytest.raises(MismatchedLogits, match="shape"):
        compare(case, right[:-1])
    with pytest.raises(MismatchedLogits, match="float"):
        compare(case, right.astype(np.int64))
    with pytest.raises(MismatchedLogits, match="float"):
        compare(case, torch.zeros(257, 256, dtype=torch.int64))
    for positions in ([1, 0], [0, 0], [-1, 0], [0, 257]):
        with pytest.raises(MismatchedLogits, match="ascend"):
            compare(case, right[:2], positions)
    with pytest.raises(MismatchedLogits, match="hidden"):
        compare_boundaries(case, np.zeros((257, 3, 64)))


def test_a_comparison_is_no_bool(case: Case, right: np.ndarray) -> None:
    with pytest.raises(TypeError, match="passed"):
        assert compare(case, right)


@settings(max_examples=examples(30), deadline=None)
@given(row=st.integers(0, 256), rank=st.integers(0, 63), size=st.floats(1e-7, 50.0), sign=st.sampled_from((-1.0, 1.0)))
def test_any_error_over_the_limit_is_seen(row: int, rank: int, size: float, sign: float) -> None:
    case = load_goldens(ROOT / "micro").cases[CASE]
    wrong = rebuilt_logits(case)[0]
    token = case.fp64.top_ids[row, rank]
    wrong[row, token] += sign * size
    result = compare(case, wrong, tolerance=LOOSE)
    assert not result.passed
    assert result.max >= 0.05 * min(size, 1.0) or case.fp64.logprobs[row, rank] > -0.1
    assert result.worst_position == row


def test_limits_are_inclusive_and_each_counts() -> None:
    values = {"max": 4.0, "mean": 1.0, "p99": 3.0, "logsumexp": 4.0, "regret": 2.0}
    worst = {"worst_case": "x", "worst_position": 0, "worst_token": 0}
    for name in ("max", "mean", "p99", "regret"):
        for limit, passed in ((values[name], True), (values[name] * 0.999, False)):
            assert Comparison("x", 1, **values, **worst, tolerance=Tolerance("x", **{name: limit})).passed is passed
    floor = Comparison("x", 1, **values, **worst, tolerance=Tolerance("x"))
    assert Tolerance.multiple_of("y", floor, 1.5) == Tolerance("y", mean=1.5, p99=4.5, regret=3.0)


def test_boundaries_name_the_layer(case: Case) -> None:
    hidden = np.zeros((257, *case.boundaries.hidden.shape[1:]))
    hidden[case.boundaries.positions] = case.boundaries.hidden
    assert compare_boundaries(case, hidden).max() == 0.0
    hidden[:, 2] *= 1.01
    assert np.flatnonzero(compare_boundaries(case, hidden) > 1e-3).tolist() == [2]


def test_the_recorded_noise_is_the_one_in_the_manifest(goldens: Goldens) -> None:
    for golden, other in (("fp64", "fp32"), ("fp32", "bf16")):
        result = pool("noise", goldens.documents.values(), golden, other)
        noted = goldens.manifest["noise_floor"][f"{other}_against_{golden}"]
        assert result.num_positions == noted["num_positions"] > 0
        for metric in ("max", "mean", "p99", "logsumexp", "regret"):
            assert getattr(result, metric) == pytest.approx(noted[metric], rel=1e-3, abs=1e-12)
        assert 0 < result.max < (1e-2 if other == "fp32" else 2.0)


def test_scores_alone_are_compared_as_their_logits_are(case: Case, right: np.ndarray) -> None:
    golden = case.fp64
    wrong = right + np.random.default_rng(0).normal(0, 0.3, right.shape)
    logsumexp = np.log(np.exp(wrong).sum(-1))
    logprobs = np.take_along_axis(wrong, golden.top_ids, axis=1) - logsumexp[:, None]
    found = compare_scores("one", [(case.name, golden, Scores(logprobs, logsumexp, wrong.argmax(-1)))], LOOSE)
    want = compare(case, wrong, tolerance=LOOSE)
    assert found.regret == want.regret > 0
    assert (found.num_positions, found.worst_position, found.worst_token) == (want.num_positions, want.worst_position, want.worst_token)
    assert np.allclose([found.max, found.mean, found.p99, found.logsumexp], [want.max, want.mean, want.p99, want.logsumexp])
    assert not found.passed
    with pytest.raises(MismatchedLogits, match="shapes"):
        compare_scores("one", [(case.name, golden, Scores(logprobs[:-1], logsumexp, wrong.argmax(-1)))])
    with pytest.raises(NothingCompared):
        compare_scores("none", [])
