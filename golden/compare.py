"""Compares logits with goldens. Gives a record of numbers and limits, never a bare bool; where logits come from is the caller's affair.

Metrics, in nat, over the golden's top-k tokens at each compared position:
max, mean, p99   of |our logprob - golden logprob| (max also takes in the next one)
logsumexp        max of |our logsumexp - golden logsumexp|: a constant added to all logits leaves logprobs alone, not this
regret           max over positions of best golden logprob - golden logprob of our likeliest token. If that token is outside the golden's
                 top k, the k-th logprob stands in for its own, so the figure is a lower bound; it is far over any limit all the same
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from twinfer.golden.manifest import Case, Recorded

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NothingCompared(AssertionError):
    """A comparison of zero positions, which would pass whatever the logits are."""


class MismatchedLogits(ValueError):
    """Logits whose shape, dtype or positions do not fit the golden."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Upper limits in nat, each inclusive; None leaves a metric unlimited."""

    name: str
    max: float | None = None
    mean: float | None = None
    p99: float | None = None
    regret: float | None = None

    @classmethod
    def multiple_of(cls, name: str, floor: "Comparison", factor: float) -> "Tolerance":
        """The numerics gate's limits: `factor` times mean, p99 and regret of `floor`, plain PyTorch measured in the same run."""
        return cls(name, mean=factor * floor.mean, p99=factor * floor.p99, regret=factor * floor.regret)


UNLIMITED = Tolerance("unlimited")
# fp64 against HF widened to fp64, and fp32 against HF's fp32. The fp32 floor is measured: see recipe.py.
FP64 = Tolerance("fp64", max=1e-10)
FP32 = Tolerance("fp32", max=1e-4)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found. Not a bool on purpose (`bool()` raises): read `passed`, or call `check()`."""

    name: str
    num_positions: int
    max: float
    mean: float
    p99: float
    logsumexp: float
    regret: float
    worst_case: str
    worst_position: int
    worst_token: int
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """Every limited metric is within its limit and no metric is NaN."""
        if any(np.isnan(value) for value in (self.max, self.mean, self.p99, self.logsumexp, self.regret)):
            return False
        limits = self.tolerance
        pairs = ((self.max, limits.max), (self.mean, limits.mean), (self.p99, limits.p99), (self.regret, limits.regret))
        return all(limit is None or value <= limit for value, limit in pairs)

    def check(self) -> "Comparison":
        """Itself if it passed, else AssertionError with the figures."""
        if not self.passed:
            raise AssertionError(str(self))
        return self

    def __bool__(self) -> bool:
        raise TypeError("a Comparison is no bool: read .passed")

    def __str__(self) -> str:
        return (
            f"{self.name}: {'passed' if self.passed else 'FAILED'}, {self.num_positions} golden positions compared; "
            f"max {self.max:.3g} mean {self.mean:.3g} p99 {self.p99:.3g} logsumexp {self.logsumexp:.3g} regret {self.regret:.3g} nat; "
            f"worst at {self.worst_case}[{self.worst_position}], token {self.worst_token}; {self.tolerance}"
        )


@dataclass(frozen=True, slots=True)
class _Errors:
    """Absolute differences of one case, in nat."""

    case: str
    positions: "NDArray[np.int64]"  # [P]
    top_ids: "NDArray[np.int64]"  # [P, K]
    logprobs: "NDArray[np.float64]"  # [P, K]
    logsumexp: "NDArray[np.float64]"  # [P]
    regret: "NDArray[np.float64]"  # [P]


def compare(
    case: Case, logits: Any, positions: Sequence[int] | None = None, *, against: str = "fp64", tolerance: Tolerance = UNLIMITED
) -> Comparison:
    """Compare `logits` with one precision of `case` at the positions that both have.

    `logits`: numpy array or torch tensor of any float dtype, [T, V] for the whole case, or [Q, V] at `positions` (Q of them, ascending).
    `against`: 'fp64', 'fp32' or 'bf16'. Raises `MismatchedLogits`, and `NothingCompared` if no position is shared. NaN never passes.
    """
    return _summarise(case.name, [_errors(case, logits, positions, against)], tolerance)


def compare_all(
    cases: Iterable[Case], forward: "Callable[[NDArray[np.int64]], Any]", *, against: str = "fp64", tolerance: Tolerance = UNLIMITED
) -> Comparison:
    """One comparison over all `cases`: `forward(token_ids [T])` gives logits [T, V]. A case without a golden of that precision adds nothing."""
    errors = [_errors(case, forward(case.token_ids), None, against) for case in cases]
    return _summarise(f"{len(errors)} cases", errors, tolerance)


def pool(name: str, cases: Iterable[Case], golden: str, other: str) -> Comparison:
    """The noise between two recorded precisions: HF's `other` compared with HF's `golden`, over all documents at once."""
    errors = []
    for case in cases:
        mine, theirs = getattr(case, golden), getattr(case, other)
        _, left, right = np.intersect1d(mine.positions, theirs.positions, return_indices=True)
        rows = (theirs.logprobs[right], theirs.logsumexp[right], theirs.top1_ids[right])
        errors.append(_differences(case.name, mine, left, *rows))
    return _summarise(name, errors, UNLIMITED)


@dataclass(frozen=True, slots=True)
class Scores:
    """What somebody gave at the P positions of a Recorded, at its K tokens each: all that a comparison needs of logits that are too many to keep."""

    logprobs: "NDArray[np.float64]"  # [P, K], nat, at the golden's top_ids
    logsumexp: "NDArray[np.float64]"  # [P], nat
    top1_ids: "NDArray[np.int64]"  # [P]


def compare_scores(name: str, pairs: "Iterable[tuple[str, Recorded, Scores]]", tolerance: Tolerance = UNLIMITED) -> Comparison:
    """One comparison over (name, golden, scores at all of its positions). Raises `MismatchedLogits` for scores of another shape, `NothingCompared`."""
    errors = []
    for case, golden, scores in pairs:
        shapes = (scores.logprobs.shape, scores.logsumexp.shape, scores.top1_ids.shape)
        if shapes != (golden.top_ids.shape, golden.positions.shape, golden.positions.shape):
            raise MismatchedLogits(f"{case}: scores of shapes {shapes}, expected {golden.top_ids.shape} and twice {golden.positions.shape}")
        errors.append(_differences(case, golden, np.arange(len(golden.positions)), scores.logprobs, scores.logsumexp, scores.top1_ids))
    return _summarise(name, errors, tolerance)


def compare_boundaries(case: Case, hidden: Any) -> "NDArray[np.float64]":
    """Per layer boundary, the largest |difference| at the golden's full positions, relative to the boundary's largest golden magnitude.

    `hidden`: [T, L + 2, h], outputs of embedding, layers, final norm, any float dtype; returns [L + 2] float64. The first large entry
    names the first wrong layer. Raises `MismatchedLogits`, `NothingCompared`.
    """
    golden = case.boundaries
    ours = _as_float64(hidden)
    wanted = (len(case.token_ids), *golden.hidden.shape[1:])
    if ours.shape != wanted:
        raise MismatchedLogits(f"{case.name}: hidden states of shape {ours.shape}, expected {wanted}")
    if len(golden.positions) == 0:
        raise NothingCompared(f"{case.name}: no layer boundaries are stored for it")
    difference = np.abs(ours[golden.positions] - golden.hidden).max(axis=(0, 2))
    return np.asarray(difference / np.abs(golden.hidden).max(axis=(0, 2)))


def _as_float64(values: Any) -> "NDArray[np.float64]":
    if hasattr(values, "detach"):  # a torch tensor; numpy has no bfloat16
        if not values.is_floating_point():
            raise MismatchedLogits(f"dtype {values.dtype}: expected a float dtype")
        values = values.detach().double().cpu().numpy()
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.floating):
        raise MismatchedLogits(f"dtype {array.dtype}: expected a float dtype")
    return array.astype(np.float64)


def _errors(case: Case, logits: Any, positions: Sequence[int] | None, against: str) -> _Errors:
    golden: Recorded = {"fp64": case.fp64, "fp32": case.fp32, "bf16": case.bf16}[against]
    ours = _as_float64(logits)
    where = np.arange(len(case.token_ids)) if positions is None else np.asarray(positions, dtype=np.int64)
    if ours.shape != (len(where), golden.vocab_size):
        raise MismatchedLogits(f"{case.name}: logits of shape {ours.shape}, expected {(len(where), golden.vocab_size)}")
    if positions is not None and (where.ndim != 1 or np.any(np.diff(where) <= 0) or np.any((where < 0) | (where >= len(case.token_ids)))):
        raise MismatchedLogits(f"{case.name}: positions must ascend within 0..{len(case.token_ids) - 1}")
    _, rows, picked = np.intersect1d(golden.positions, where, return_indices=True)
    ours = ours[picked]
    with np.errstate(all="ignore"):
        peak = ours.max(axis=1, keepdims=True)
        logsumexp = peak[:, 0] + np.log(np.exp(ours - peak).sum(axis=1))
        logprobs = np.take_along_axis(ours, golden.top_ids[rows], axis=1) - logsumexp[:, None]
    return _differences(case.name, golden, rows, logprobs, logsumexp, ours.argmax(axis=1))


def _differences(
    case: str,
    golden: Recorded,
    rows: "NDArray[np.int64]",
    logprobs: "NDArray[np.float64]",
    logsumexp: "NDArray[np.float64]",
    top1_ids: "NDArray[np.int64]",
) -> _Errors:
    ids, wanted = golden.top_ids[rows], golden.logprobs[rows]
    found = ids == top1_ids[:, None]
    picked = np.where(found.any(axis=1), wanted[np.arange(len(rows)), found.argmax(axis=1)], wanted.min(axis=1, initial=np.inf))
    regret = wanted.max(axis=1, initial=-np.inf) - picked
    with np.errstate(invalid="ignore"):
        return _Errors(
            case,
            golden.positions[rows],
            ids,
            np.abs(logprobs - wanted),
            np.abs(logsumexp - golden.logsumexp[rows]),
            np.where(np.isnan(logsumexp), np.nan, regret),
        )


def _summarise(name: str, errors: Sequence[_Errors], tolerance: Tolerance) -> Comparison:
    num_positions = sum(len(one.positions) for one in errors)
    if num_positions == 0:
        raise NothingCompared(f"{name}: zero golden positions compared")
    compared = [one for one in errors if len(one.positions)]
    flat = np.concatenate([one.logprobs.ravel() for one in compared])
    logsumexp = float(np.concatenate([one.logsumexp for one in compared]).max())
    # NaN counts as the worst: np.argmax would find it inside one array, not across several.
    worst = max(compared, key=lambda one: float(np.nan_to_num(one.logprobs.max(), nan=np.inf)))
    row, column = np.unravel_index(int(worst.logprobs.argmax()), worst.logprobs.shape)
    return Comparison(
        name=name,
        num_positions=num_positions,
        max=float(np.maximum(flat.max(), logsumexp)),
        mean=float(flat.mean()),
        p99=float(np.percentile(flat, 99)),
        logsumexp=logsumexp,
        regret=float(np.concatenate([one.regret for one in compared]).max()),
        worst_case=worst.case,
        worst_position=int(worst.positions[row]),
        worst_token=int(worst.top_ids[row, column]),
        tolerance=tolerance,
    )
