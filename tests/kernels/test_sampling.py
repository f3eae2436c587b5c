"""Sampling kernels against the reference's sampler: noise, scores, filters, tokens, errors, and what a token may depend on. Not log probabilities.

Tokens must be the reference's unless its two best perturbed scores lie within NEAR of each other; a top-p cut unless the deciding cumulative
probability lies within NEAR of p. Such cases are counted, and the count is bounded. TEST_DEVICE=cuda runs compiled kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.budget import examples, repeatable
from tests.sampling.columns import make_columns
from twinfer.kernels.sampling import kernel
from twinfer.kernels.sampling.sampler import Columns, Scratch, Stages, error_text, sample, scratch_shapes
from twinfer.kernels.sampling.tiles import Tiles
from twinfer.noise import Purpose
from twinfer.plan import SamplingColumns
from twinfer.reference import sampler as reference
from twinfer.reference.philox import gumbel_noise, uniform_words
from twinfer.sampling import FLOAT32_MAX, FLOAT32_TINY

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
NEAR = 1e-5
# The interpreter's time is the number of operations, so there a search has few levels; on a GPU 2^8 sums a token would not fit the registers.
WHOLE = Tiles(chunk=1024, block=1024, digit=8 if DEVICE == "cpu" else 4, digits=256, sparse=64, sparse_programs=1, warps=4)
CUT_UP = Tiles(chunk=64, block=32, digit=4, digits=16, sparse=4, sparse_programs=2, warps=4)
# An example takes a third of a second in the interpreter, so a failing one is shown as it was found: shrinking would take minutes.
SETTINGS = settings(max_examples=examples(40 if DEVICE == "cpu" else 600), deadline=None, derandomize=repeatable(), phases=(Phase.explicit, Phase.generate))
FEW = settings(SETTINGS, max_examples=examples(4 if DEVICE == "cpu" else 100))


# --------------------------------------------------------------------------------------------------------------- calls


def on_device(sampling: SamplingColumns, mask: NDArray[np.uint32] | None) -> Columns:
    """A plan's columns as tensors."""
    names = [name for name in Columns.__slots__ if name not in ("seed", "mask")]
    columns = {name: torch.from_numpy(np.ascontiguousarray(getattr(sampling, name))).to(DEVICE) for name in names}
    bits = None if mask is None else torch.from_numpy(mask.view(np.int32)).to(DEVICE)
    return Columns(**columns, seed=torch.from_numpy(sampling.seed.view(np.int64)).to(DEVICE), mask=bits)


@dataclass
class Drawn:
    """What a call gave; `scratch` afterwards."""

    tokens: NDArray[np.int32]
    errors: dict[int, str]
    raw_errors: Tensor
    feed: Tensor | None
    scratch: Scratch


def poisoned(num_positions: int, vocabulary: int, tiles: Tiles) -> Scratch:
    tensors = {}
    for name, (dtype, shape) in scratch_shapes(num_positions, vocabulary, tiles).items():
        tensors[name] = torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min + 7, dtype=dtype, device=DEVICE)
    return Scratch(**tensors)


def run(
    logits: Tensor,
    rows: NDArray[Any],
    positions: NDArray[Any],
    sampling: SamplingColumns,
    mask: NDArray[np.uint32] | None = None,
    purpose: Purpose = Purpose.DRAW,
    tiles: Tiles = WHOLE,
    stages: Stages | None = None,
    slots: list[int] | None = None,
) -> Drawn:
    n = len(rows)
    tokens = torch.full((n,), -9, dtype=torch.int32, device=DEVICE)
    errors = torch.full((n, 3), -9, dtype=torch.int32, device=DEVICE)
    scratch = poisoned(n, logits.shape[1], tiles)
    feed = None if slots is None else torch.full((1 + max(slots),), -9, dtype=torch.int32, device=DEVICE)
    sample(
        logits.to(DEVICE),
        torch.from_numpy(rows.astype(np.int32)).to(DEVICE),
        torch.from_numpy(positions.astype(np.int32)).to(DEVICE),
        on_device(sampling, mask),
        tokens,
        errors,
        scratch,
        Stages.of(sampling, mask is not None) if stages is None else stages,
        None if slots is None else torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        feed,
        purpose,
        tiles,
    )
    told = {i: text for i, entry in enumerate(errors.cpu().numpy()) if (text := error_text(entry, logits.shape[1])) is not None}
    return Drawn(tokens.cpu().numpy(), told, errors.cpu(), feed, scratch)


# -------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Near:
    """Positions compared, and those that were excused because the reference itself was near a tie or an edge of top-p."""

    compared: int = 0
    excused: int = 0


def reference_scores(logits: Tensor, row: int, sampling: SamplingColumns, mask: NDArray[np.uint32] | None) -> Tensor:
    """The reference's penalised scores of one position, [V] fp64."""
    scores = logits.double()
    if mask is not None:
        scores = reference.apply_mask(scores, mask[row])
    return reference.penalise(reference.apply_bias(scores, row, sampling), row, sampling)


def numpy_keys(scores: Tensor) -> NDArray[np.int64]:
    """Integers in the order of fp64 scores, by sign and magnitude."""
    bits = (scores + 0.0).numpy().view(np.int64)
    return np.where(bits < 0, -(bits & np.int64(2**63 - 1)) - 1, bits)


def kept_by_kernel(drawn: Drawn, i: int, scores: Tensor, levels: int, tiles: Tiles) -> set[int]:
    """Token ids before position i's cut, by the cut that the search left in the scratch."""
    keys = numpy_keys(scores) >> (64 - tiles.digit * levels)
    cut, cut_id = int(drawn.scratch.cut[i]), int(drawn.scratch.cut_id[i])
    return {t for t, key in enumerate(keys.tolist()) if key > cut or (key == cut and t <= cut_id)}


def check(
    logits: Tensor,
    rows: NDArray[Any],
    positions: NDArray[Any],
    sampling: SamplingColumns,
    mask: NDArray[np.uint32] | None,
    purpose: Purpose,
    drawn: Drawn,
    near: Near,
    tiles: Tiles = WHOLE,
) -> None:
    """Asserts that tokens, errors and cuts are the reference's."""
    want = reference.sample(logits, rows, positions, sampling, mask, purpose)
    assert drawn.errors == want.errors
    stages = Stages.of(sampling, mask is not None)
    bits = 64 if stages.adjust else {torch.float32: 35, torch.float16: 22, torch.bfloat16: 19}[logits.dtype]
    for i, row in enumerate(rows.tolist()):
        near.compared += 1
        got, temperature = int(drawn.tokens[i]), float(sampling.temperature[row])
        if i in want.errors:
            assert got == 0
            continue
        if temperature == 0:
            assert got == want.tokens[i], "greedy has no margin"
            continue
        adjusted = reference_scores(logits[i], row, sampling, mask)
        scores = adjusted / temperature
        top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row])
        cut = kept_by_kernel(drawn, i, adjusted, -(-bits // tiles.digit), tiles)
        right = set(reference.kept_tokens(scores, top_k, top_p, 0.0).tolist())
        lowered = set(reference.kept_tokens(scores, top_k, max(top_p - NEAR, 0.0), 0.0).tolist()) if top_p < 1 else right
        raised = set(reference.kept_tokens(scores, top_k, min(top_p + NEAR, 1.0), 0.0).tolist()) if top_p < 1 else right
        assert lowered <= cut <= raised, f"{len(cut)} kept, the reference keeps {len(right)}"
        # The token by the kernel's own cut, so that a cut near p excuses nothing else.
        noise = gumbel_noise(uniform_words(sampling.seed[[row]], sampling.sample[[row]], positions[[i]], purpose, len(scores)))[0]
        ids = torch.tensor(sorted(cut & set(reference.kept_tokens(scores, 0, 1.0, min_p).tolist())))
        perturbed = (scores + noise)[ids]
        best = float(perturbed.max())
        assert got in ids
        gap = best - float((scores + noise)[got])
        # where fp64 itself rounds by more than NEAR, at 1e10 and above, the noise is rounded to the scores' own spacing
        assert gap <= max(NEAR, 4 * np.spacing(abs(best))), f"token {got} is {gap} behind"
        excused = cut != right or gap > 0
        assert excused or got == want.tokens[i]
        near.excused += excused


def test_the_comparison_refuses_a_wrong_token_and_a_wrong_cut() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    rows, positions = np.array([0]), np.array([5])
    sampling = make_columns(top_k=9)
    good = run(logits, rows, positions, sampling)
    check(logits, rows, positions, sampling, None, Purpose.DRAW, good, Near())
    kept = logits[0].argsort(descending=True)[:9].tolist()
    other = replace(good, tokens=np.array([next(t for t in kept if t != good.tokens[0])]))
    with pytest.raises(AssertionError, match="behind"):
        check(logits, rows, positions, sampling, None, Purpose.DRAW, other, Near())
    good.scratch.cut_id[0] = -1
    with pytest.raises(AssertionError, match="8 kept, the reference keeps 9"):
        check(logits, rows, positions, sampling, None, Purpose.DRAW, good, Near())


# -------------------------------------------------------------------------------------------------------------- noise


@triton.jit
def words_kernel(SEED, SAMPLE, POSITION, PURPOSE, WORDS, NOISE, first, BLOCK: tl.constexpr):
    """WORDS, NOISE [BLOCK] of the token ids from `first` on."""
    t = tl.arange(0, BLOCK)
    words = kernel.words_of(first, tl.load(SEED), tl.load(SAMPLE), tl.load(POSITION), tl.load(PURPOSE), BLOCK)
    tl.store(WORDS + t, words.to(tl.int64))
    tl.store(NOISE + t, kernel.gumbel(words))


@triton.jit
def gumbel_kernel(WORDS, NOISE, BLOCK: tl.constexpr):
    """NOISE [BLOCK] of WORDS [BLOCK] int64."""
    t = tl.arange(0, BLOCK)
    tl.store(NOISE + t, kernel.gumbel(tl.load(WORDS + t).to(tl.uint32)))


@settings(SETTINGS, max_examples=examples(15))
@given(
    seed=st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)),
    index=st.sampled_from([0, 1, 1023]),
    position=st.sampled_from([0, 1, 262143, 2**31 - 1]),
    purpose=st.sampled_from(list(Purpose)),
    first=st.sampled_from([0, 4, 1024]),
)
def test_words_are_the_references_to_the_bit(seed: int, index: int, position: int, purpose: Purpose, first: int) -> None:
    def scalar(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=DEVICE)

    words = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    noise = torch.zeros(64, device=DEVICE)
    signed = int(np.array([seed], np.uint64).view(np.int64)[0])
    words_kernel[(1,)](scalar(signed, torch.int64), scalar(index), scalar(position), scalar(int(purpose)), words, noise, first, BLOCK=64)
    want = uniform_words(np.array([seed], np.uint64), np.array([index]), np.array([position]), purpose, first + 64)[0, first:]
    assert torch.equal(words.cpu(), want)
    assert float((noise.cpu().double() - gumbel_noise(want)).abs().max()) < 2e-6


def test_noise_agrees_with_fp64_over_all_words() -> None:
    """Every region of words: both ends, around every power of two, around the switches of the complement form, and a million in between."""
    edges = [2**b + d for b in range(33) for d in range(-40, 41)] + [int(2**32 * w) + d for w in (0.29, 0.71) for d in range(-40, 41)]
    ends = torch.tensor(sorted({w for e in edges for w in (e, 2**32 - 1 - e) if 0 <= w < 2**32}))
    words = torch.cat([ends, torch.randint(0, 2**32, (2**20 - len(ends),), generator=torch.Generator().manual_seed(0))])
    noise = torch.zeros(len(words), device=DEVICE)
    for at in range(0, len(words), 2**16):
        gumbel_kernel[(1,)](words[at : at + 2**16].to(DEVICE), noise[at : at + 2**16], BLOCK=2**16)
    want = gumbel_noise(words)
    error = (noise.cpu().double() - want).abs() / want.abs().clamp(min=1.0)
    assert float(error.max()) < 4e-7


# ------------------------------------------------------------------------------------------------------ all parameters


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """One position with any parameters; logits with ties, bans and peaks."""
    seed = draw(st.integers(0, 10**6))
    random = np.random.default_rng(seed)
    size = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128, 255, 700])))
    kind = draw(st.sampled_from(["normal", "wide", "ties", "equal", "peak", "bans"]))
    values = {
        "normal": random.normal(size=size) * 2,
        "wide": random.normal(size=size) * 30,
        "ties": random.integers(-2, 3, size) * 0.5,
        "equal": np.full(size, random.choice([-3.0, 0.0, 7.5])),
        "peak": np.where(np.arange(size) == size // 2, 15.0, random.normal(size=size)),
        "bans": np.where(random.random(size) < 0.6, -np.inf, random.integers(-2, 3, size)),
    }[kind]

    def some(count: int) -> list[int]:
        return [int(t) for t in random.choice(size, min(count, size), replace=False)]

    adjusted = draw(st.sampled_from(["no", "no", "bias", "seen", "mask", "all"]))
    bias = {t: float(random.choice([-np.inf, 0.1, -2.0, 30.0])) for t in some(4)} if adjusted in ("bias", "all") else {}
    seen = {t: int(random.integers(0, 3)) for t in some(6)} if adjusted in ("seen", "all") else {}
    masked = adjusted in ("mask", "all")
    columns = make_columns(
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.0, 2.0, 50.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 20, size, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 2**-24])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0])),
        repetition=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence=draw(st.sampled_from([0.0, 0.7])),
        frequency=draw(st.sampled_from([0.0, 0.3, -0.2])),
        seed=draw(st.sampled_from([0, 7, 2**32 - 1, 2**32, 2**63, 2**64 - 1])),
        sample=draw(st.sampled_from([0, 5])),
        bias=[bias],
        seen=[seen],
    )
    return {
        "logits": torch.from_numpy(values)[None].to(draw(st.sampled_from([torch.float32, torch.float16]))),
        "positions": np.array([draw(st.sampled_from([1, 4096, 2**31 - 1]))]),
        "sampling": columns,
        "mask": random.integers(0, 2**32, (1, -(-size // 32) + 1), dtype=np.uint32) if masked else None,
        "purpose": draw(st.sampled_from([Purpose.DRAW, Purpose.DRAW, Purpose.RESAMPLE])),
    }


def test_token_and_cut_are_the_references_for_all_parameters() -> None:
    near = Near()

    @SETTINGS
    @given(case=cases())
    def compare(case: dict[str, Any]) -> None:
        rows = np.zeros(1, np.int32)
        drawn = run(case["logits"], rows, case["positions"], case["sampling"], case["mask"], case["purpose"])
        check(case["logits"], rows, case["positions"], case["sampling"], case["mask"], case["purpose"], drawn, near)

    compare()
    assert near.compared >= 40
    # p = 0.25, 0.5 and 0.75 of equal logits lie on an edge on purpose, where fp64 rounds either way; everything else is 1e-5 of the cases
    assert near.excused <= near.compared // 10, near


@FEW
@given(case=cases())
def test_tiles_do_not_show(case: dict[str, Any]) -> None:
    """Chunks, blocks and digits are free: the same tokens, errors and cuts to the bit."""
    rows = np.zeros(1, np.int32)
    cut = slice(0, 150)
    arguments = (case["logits"][:, cut], rows, case["positions"], ids_below(case["sampling"], 150), case["mask"], case["purpose"])
    whole, parts = run(*arguments), run(*arguments, tiles=CUT_UP)
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert torch.equal(parts.raw_errors, whole.raw_errors)
    mode = int(whole.scratch.mode[0]) if case["sampling"].temperature[0] > 0 else 0
    if mode and Stages.of(case["sampling"], case["mask"] is not None).adjust:  # else the levels read different numbers of bits
        assert int(parts.scratch.cut[0]) == int(whole.scratch.cut[0])
    if mode:
        assert int(parts.scratch.cut_id[0]) == int(whole.scratch.cut_id[0])


def ids_below(sampling: SamplingColumns, size: int) -> SamplingColumns:
    """One row's columns with the entries of tokens below `size` alone."""
    bias, seen = sampling.bias_ids < size, sampling.seen_ids < size
    return replace(
        sampling,
        bias_ids=sampling.bias_ids[bias],
        bias_values=sampling.bias_values[bias],
        bias_indptr=np.array([0, bias.sum()], np.int32),
        seen_ids=sampling.seen_ids[seen],
        seen_counts=sampling.seen_counts[seen],
        seen_indptr=np.array([0, seen.sum()], np.int32),
    )


def mixed_columns(num_rows: int, size: int, seed: int) -> SamplingColumns:
    """Every feature on in some row."""
    random = np.random.default_rng(seed)
    some = [[int(t) for t in random.choice(size, 6, replace=False)] if row % 2 else [] for row in range(num_rows)]
    return make_columns(
        num_rows,
        temperature=[(0.7, 1.0, 0.0, 1.5)[row % 4] for row in range(num_rows)],
        top_k=[(0, 5, 0, 40)[row % 4] for row in range(num_rows)],
        top_p=[(0.9, 1.0, 0.8)[row % 3] for row in range(num_rows)],
        min_p=[(0.0, 0.02)[row % 2] for row in range(num_rows)],
        repetition=1.2,
        presence=0.4,
        frequency=0.1,
        seed=random.integers(0, 2**64 - 1, num_rows, dtype=np.uint64),
        bias=[{t: float(random.choice([-np.inf, 2.0])) for t in ids[:3]} for ids in some],
        seen=[{t: int(random.integers(0, 3)) for t in ids} for ids in some],
    )


def test_a_large_vocabulary_in_many_chunks() -> None:
    """5000 tokens, a size that no tile divides, from a tensor whose rows are farther apart."""
    size, near = 5001, Near()
    logits = (torch.randn(2, size + 7, generator=torch.Generator().manual_seed(3)) * 2)[:, :size]
    sampling = mixed_columns(4, size, 5)
    rows, positions = np.array([0, 3]), np.array([9, 10])
    tiles = replace(WHOLE, chunk=4096, block=4096, digits=1024 if DEVICE == "cpu" else 256)
    drawn = run(logits, rows, positions, sampling, tiles=tiles)
    check(logits, rows, positions, sampling, None, Purpose.DRAW, drawn, near, tiles)
    assert near.excused == 0


def test_adjusted_scores_are_the_references_to_the_bit() -> None:
    size = 300
    sampling = mixed_columns(4, size, 6)
    mask = np.random.default_rng(7).integers(0, 2**32, (4, 10), dtype=np.uint32)
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(8)) * 5
    drawn = run(logits, np.arange(4), np.arange(4), replace(sampling, temperature=np.zeros(4, np.float32)), mask)
    for i in range(4):
        assert torch.equal(drawn.scratch.scores[i].cpu(), reference_scores(logits[i], i, sampling, mask))


# ------------------------------------------------------------------------------------------- what a token may depend on


def test_a_row_alone_is_the_row_in_a_batch_to_the_bit() -> None:
    """Whatever stages the other rows switch on; padding, order and a broken neighbour change nothing either."""
    size = 90
    sampling = mixed_columns(4, size, 9)
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(10)) * 2
    rows, positions = np.array([3, 0, 1, 2, 0, 3]), np.array([7, 8, 9, 10, 11, 12])
    together = run(logits, rows, positions, sampling)
    assert together.errors == {}
    order, broken = np.array([4, 1, 0]), logits.clone()
    broken[1] = torch.nan
    padded = run(broken[[5, *order]], np.array([-1, *rows[order]]), np.array([0, *positions[order]]), sampling)
    assert padded.tokens[[0, 1, 3]].tolist() == [0, together.tokens[4], together.tokens[0]]
    assert list(padded.errors) == [2]
    for i in (0, 1, 3):
        one = single(sampling, int(rows[i]))
        alone = run(logits[[i]], np.zeros(1, np.int32), positions[[i]], one)
        assert alone.tokens[0] == together.tokens[i]
        if one.temperature[0] > 0:
            bits = 64 if Stages.of(one, False).adjust else 35  # of fp32
            shift = 64 - WHOLE.digit * -(-bits // WHOLE.digit)
            assert int(together.scratch.cut[i]) >> shift == int(alone.scratch.cut[0])
            assert int(together.scratch.cut_id[i]) == int(alone.scratch.cut_id[0])


def single(sampling: SamplingColumns, row: int) -> SamplingColumns:
    """The columns of one row, as row 0 of a plan of its own."""
    by_row = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed", "sample", "num_logprobs")
    bias, seen = (slice(int(p[row]), int(p[row + 1])) for p in (sampling.bias_indptr, sampling.seen_indptr))
    return SamplingColumns(
        **{name: getattr(sampling, name)[[row]] for name in by_row},
        bias_indptr=np.array([0, bias.stop - bias.start], np.int32),
        bias_ids=sampling.bias_ids[bias],
        bias_values=sampling.bias_values[bias],
        seen_indptr=np.array([0, seen.stop - seen.start], np.int32),
        seen_ids=sampling.seen_ids[seen],
        seen_counts=sampling.seen_counts[seen],
    )


def test_seed_sample_position_and_purpose_all_change_the_tokens() -> None:
    count = 8
    logits, rows, positions = torch.zeros(count, 64), np.zeros(count, np.int32), np.arange(count)
    base = make_columns(seed=3)
    drawn = [
        run(logits, rows, positions, base).tokens,
        run(logits, rows, positions, make_columns(seed=4)).tokens,
        run(logits, rows, positions, make_columns(seed=3 + 2**32)).tokens,
        run(logits, rows, positions, make_columns(seed=3, sample=1)).tokens,
        run(logits, rows, positions + count, base).tokens,
        run(logits, rows, positions, base, purpose=Purpose.RESAMPLE).tokens,
    ]
    for i, tokens in enumerate(drawn):
        # unrelated draws agree with probability 1/64 each
        assert all((tokens == other).sum() <= 3 for other in drawn[:i])


def test_stages_beyond_what_a_row_needs_change_nothing() -> None:
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(11))
    sampling = make_columns(2, temperature=[0.0, 1.0], seed=5)
    rows, positions = np.arange(2), np.array([4, 5])
    assert Stages.of(sampling, False) == Stages(adjust=False, draw=True, top_k=False, top_p=False)
    assert Stages.of(make_columns(temperature=0.0, top_k=3, top_p=0.5), False) == Stages(adjust=False, draw=False, top_k=False, top_p=False)
    few, all_of_them = run(logits, rows, positions, sampling), run(logits, rows, positions, sampling, stages=Stages())
    assert few.tokens.tolist() == all_of_them.tokens.tolist() == reference.sample(logits, rows, positions, sampling).tokens.tolist()


# ------------------------------------------------------------------------------------------------ errors, feed, extremes


def test_failing_positions_are_named_as_the_reference_names_them() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(12))
    logits[0, 33] = torch.nan
    logits[2, [5, 36]] = torch.inf
    logits[2, 37] = torch.nan
    logits[3] = -torch.inf
    # row 4 is left without a token by its bans, row 1 has a ban on its NaN
    sampling = make_columns(6, seed=9, temperature=[1, 0, 0, 1, 0, 1], top_p=0.9, bias=[{}, {2: -np.inf}, {}, {}, dict.fromkeys(range(40), -np.inf), {}])
    logits[1, 2] = torch.nan
    rows, positions, slots = np.arange(6), np.arange(6), [3, 0, -1, 5, 1, 2]
    drawn = run(logits, rows, positions, sampling, tiles=CUT_UP, slots=slots)
    want = reference.sample(logits, rows, positions, sampling)
    assert drawn.errors == want.errors
    assert sorted(want.errors) == [0, 1, 2, 3, 4]
    assert drawn.tokens.tolist() == want.tokens.tolist()
    assert drawn.feed is not None
    assert drawn.feed.tolist() == [0, 0, drawn.tokens[5], 0, -9, 0]


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": FLOAT32_MAX},
        {"temperature": 1e-45, "top_p": 1e-9},
        {"top_p": 1e-60, "min_p": 1e-60},
        {"repetition": FLOAT32_TINY},
        {"presence": FLOAT32_MAX, "frequency": FLOAT32_MAX},
        {"presence": -FLOAT32_MAX, "frequency": -FLOAT32_MAX},
        {"bias": [{3: FLOAT32_MAX, 4: -FLOAT32_MAX}]},
    ],
)
def test_parameters_at_the_ends_of_float32_draw_the_references_token(edge: dict[str, Any]) -> None:
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0, 1.0, -torch.inf]])
    columns: dict[str, Any] = {"bias": [{}], "seen": [{1: 0, 2: 1, 3: 2}], "top_k": 4, "top_p": 0.99, "min_p": 1e-6} | edge
    columns["bias"] = [columns["bias"][0] | {0: -np.inf}]
    sampling, rows, positions = make_columns(**columns), np.zeros(1, np.int32), np.array([3])
    drawn = run(logits, rows, positions, sampling)
    check(logits, rows, positions, sampling, None, Purpose.DRAW, drawn, Near())
    assert drawn.tokens.tolist() == reference.sample(logits, rows, positions, sampling).tokens.tolist()


def test_zeros_of_both_signs_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    for columns in ({"temperature": 0.0}, {"top_k": 1}):
        assert run(logits, np.zeros(1, np.int32), np.array([1]), make_columns(**columns)).tokens.tolist() == [0]


@pytest.mark.parametrize("tiles", [WHOLE, CUT_UP], ids=["whole", "cut up"])
def test_of_a_tie_the_lowest_ids_win_across_blocks_and_chunks(tiles: Tiles) -> None:
    """150 equal logits in blocks of 32 and chunks of 64: greedy takes the first, a filter the first ones."""
    logits = torch.full((3, 150), -1.5)
    sampling = make_columns(3, temperature=[0, 1, 1], top_k=[0, 101, 0], top_p=[1, 1, 0.503])
    drawn = run(logits, np.arange(3), np.arange(3), sampling, tiles=tiles)
    assert drawn.tokens[0] == 0
    assert drawn.scratch.cut_id[1:].tolist() == [100, 75]
    near = Near()
    check(logits, np.arange(3), np.arange(3), sampling, None, Purpose.DRAW, drawn, near, tiles)
    assert near.excused == 0


def test_min_p_drops_what_is_below_it_and_keeps_what_ties_with_the_best() -> None:
    """Half of the tokens have exp(-1) = 0.37 of the best probability: kept by 0.3, dropped by 0.5; min_p = 1 keeps the other half."""
    logits = torch.tensor([0.0, -1.0] * 20).expand(8, 40)
    rows, positions = np.zeros(8, np.int32), np.arange(8)
    odd = []
    for min_p in (0.3, 0.5, 1.0):
        sampling = make_columns(min_p=min_p, seed=4)
        tokens = run(logits, rows, positions, sampling).tokens
        assert tokens.tolist() == reference.sample(logits, rows, positions, sampling).tokens.tolist()
        odd.append(int((tokens % 2).sum()))
    assert odd[0] > 0
    assert odd[1:] == [0, 0]


def test_large_scores_keep_their_differences() -> None:
    """Around 1e7 / 3 neighbouring fp32 numbers are 0.25 apart, more than the noise can lose."""
    logits = (1e7 + torch.arange(40.0) % 4).expand(24, 40)
    rows, positions, sampling = np.zeros(24, np.int32), np.arange(24), make_columns(temperature=3.0, seed=6)
    tokens = run(logits, rows, positions, sampling).tokens
    assert tokens.tolist() == reference.sample(logits, rows, positions, sampling).tokens.tolist()


def test_what_does_not_fit_is_refused() -> None:
    logits, rows, positions, sampling = torch.zeros(1, 40), np.zeros(1, np.int32), np.array([1]), make_columns()
    with pytest.raises(ValueError, match="a mask needs"):
        run(logits, rows, positions, sampling, np.zeros((1, 2), np.uint32), stages=Stages(adjust=False))
    with pytest.raises(ValueError, match=r"logits are torch\.float64"):
        run(logits.double(), rows, positions, sampling)
    with pytest.raises(ValueError, match="scratch scores"):
        poisoned(1, 40, WHOLE).check(2, 40, WHOLE)
    with pytest.raises(ValueError, match="powers of two"):
        replace(WHOLE, block=48)
