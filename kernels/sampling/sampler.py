"""Launches the sampling kernels: `sample` and `logprobs`. It allocates nothing, reads nothing back, and its launches depend on shapes and `Stages` alone.

The order of the arithmetic is twinfer.sampling's. Given the same logits, tokens are those of fp64 arithmetic unless the two best perturbed scores lie
within 1e-5 of each other, or top-p is decided by a cumulative probability within 1e-5 of p: noise and probabilities are fp32, all else is exact.

A filter keeps a beginning of the ranking (score, then lower id), so all of them together are one cut: a score and the last id that ties with it. Top-k
and top-p find it by the same search, from the highest digits of the scores' bits to the lowest: the shortest beginning whose weight reaches a target.
For top-k a token weighs 1 and the target is k; for top-p it weighs its probability, 0 if top-k dropped it, and the target is p of the whole. Min-p looks
at each token alone. A search takes a level for each `tiles.digit` significant bits of the scores: with 4, that is 5 levels for bf16 logits, 9 for fp32
and 16 where some row is adjusted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import triton
from torch import Tensor

from twinfer.kernels.sampling import kernel
from twinfer.kernels.sampling.tiles import DEFAULT, Tiles
from twinfer.noise import Purpose
from twinfer.plan import SamplingColumns

MAX_LOGPROBS = 32  # the most alternatives that `logprobs` gives: the width of a scratch tensor
_KEY_BITS = 64
# A search reads a score as fp64. Of a narrower number only the sign, fp64's exponent and its own fraction can differ from one to the next.
_SIGNIFICANT_BITS = {torch.bfloat16: 1 + 11 + 7, torch.float16: 1 + 11 + 10, torch.float32: 1 + 11 + 23}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """twinfer.plan.SamplingColumns on the device, and the token mask.

    temperature, top_p, min_p, repetition, presence, frequency  [rows] float32
    top_k, sample                                               [rows] int32
    seed                                                        [rows] int64, the bits of the uint64
    bias_indptr, seen_indptr                                    [rows + 1] int32
    bias_ids, seen_ids, seen_counts                             [entries] int32, ids distinct within a row
    bias_values                                                 [entries] float32
    mask                                                        [rows, words] int32, the bits of the uint32; None allows all
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seed: Tensor
    sample: Tensor
    bias_indptr: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    seen_indptr: Tensor
    seen_ids: Tensor
    seen_counts: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Stages:
    """What some row of the step needs; the host says it, so that the rest is not launched. More than needed changes no token.

    adjust  a mask, a bias or seen tokens
    draw    a temperature above 0
    top_k, top_p  a filter that is on in a row with a temperature above 0
    """

    adjust: bool = True
    draw: bool = True
    top_k: bool = True
    top_p: bool = True

    @classmethod
    def of(cls, sampling: SamplingColumns, masked: bool) -> Stages:
        """What a plan's columns need."""
        drawn = sampling.temperature > 0
        return cls(
            adjust=masked or len(sampling.bias_ids) > 0 or len(sampling.seen_ids) > 0,
            draw=bool(drawn.any()),
            top_k=bool((drawn & (sampling.top_k > 0)).any()),
            top_p=bool((drawn & (sampling.top_p < 1)).any()),
        )


def scratch_shapes(max_positions: int, vocabulary: int, tiles: Tiles = DEFAULT) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every tensor of Scratch, by name. `scores` dwarfs the rest: 8 bytes a position and token, needed by `adjust` alone.

    Of the rest a position takes about 300 bytes a chunk and 256 more for each chunk's alternatives: 21 KB at a vocabulary of 151936.
    """
    n, chunks = max_positions, -(-vocabulary // tiles.chunk)
    return {
        "scores": (torch.float64, (n, vocabulary)),
        "adjusted": (torch.int32, (n,)),
        "best": (torch.float64, (n, chunks)),
        "best_id": (torch.int32, (n, chunks)),
        "bad": (torch.int32, (n, chunks)),
        "bad_id": (torch.int32, (n, chunks)),
        "mode": (torch.int32, (n,)),
        "top": (torch.float64, (n,)),
        "cut": (torch.int64, (n,)),
        "cut_id": (torch.int32, (n,)),
        "bins": (torch.int64, (n, 2, chunks, 2**tiles.digit)),
        "state": (torch.int64, (n, _KEY_BITS // tiles.digit, 2)),
        "draw": (torch.float64, (n, chunks)),
        "draw_id": (torch.int32, (n, chunks)),
        "peaks": (torch.int64, (n, chunks, MAX_LOGPROBS)),
        "mass": (torch.int64, (n, chunks)),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Workspace of `sample` and `logprobs`, shaped by `scratch_shapes`; what it holds before and after a call means nothing. One call at a time may use it."""

    scores: Tensor
    adjusted: Tensor
    best: Tensor
    best_id: Tensor
    bad: Tensor
    bad_id: Tensor
    mode: Tensor
    top: Tensor
    cut: Tensor
    cut_id: Tensor
    bins: Tensor
    state: Tensor
    draw: Tensor
    draw_id: Tensor
    peaks: Tensor
    mass: Tensor

    @classmethod
    def empty(cls, max_positions: int, vocabulary: int, tiles: Tiles = DEFAULT, device: torch.device | str = "cpu") -> Scratch:
        """Fresh tensors, for callers that keep no ledger."""
        shapes = scratch_shapes(max_positions, vocabulary, tiles)
        return cls(**{name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in shapes.items()})

    def check(self, num_positions: int, vocabulary: int, tiles: Tiles) -> None:
        """Raises ValueError where a tensor is too small or laid out for another vocabulary or chunk."""
        for name, (dtype, shape) in scratch_shapes(num_positions, vocabulary, tiles).items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape[1:] != shape[1:] or len(tensor) < num_positions or not tensor.is_contiguous():
                raise ValueError(f"scratch {name} is {tensor.dtype} {tuple(tensor.shape)}, the call needs a contiguous {dtype} {shape}")


assert [f.name for f in fields(Scratch)] == list(scratch_shapes(1, 1))


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: Columns,
    tokens: Tensor,
    errors: Tensor,
    scratch: Scratch,
    stages: Stages,
    slots: Tensor | None = None,
    feed: Tensor | None = None,
    purpose: Purpose = Purpose.DRAW,
    tiles: Tiles = DEFAULT,
) -> None:
    """One token for each of n positions.

    logits     [n, V] bfloat16, float16 or float32; rows may be any distance apart, tokens stand side by side
    rows       [n] int32, row of `columns` of each position; a negative one is padding: token 0, no error, nothing else is read or written
    positions  [n] int32 or int64, absolute position of the token to draw
    tokens     [n] int32, written; 0 where there is an error
    errors     [n, 3] int32, written: code (kernel.FINE, IS_NAN, IS_INFINITE, NONE_LEFT), id of the first such logit, how many; see `error_text`
    slots      [rows] int32, batch slot of each row, and
    feed       [slots] int32: feed[slots[row]] = token, where the slot is not negative. For rows with one position; of several, any may be the last
    """
    n, vocabulary = logits.shape
    scratch.check(n, vocabulary, tiles)
    if logits.dtype not in _SIGNIFICANT_BITS or logits.stride(1) != 1 or (slots is None) != (feed is None):
        raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}; slots and feed come together")
    if n == 0:
        return
    c, w = columns, scratch
    chunks = -(-vocabulary // tiles.chunk)
    padded = triton.next_power_of_2(chunks)
    stride = logits.stride(0)
    by_chunk, warps = (n, chunks), tiles.warps
    masked = c.mask is not None
    if masked and not stages.adjust:
        raise ValueError("a mask needs the stage `adjust`")
    if stages.adjust:
        mask = c.mask if c.mask is not None else c.top_k  # not read
        kernel.dense_kernel[by_chunk](
            logits, stride, rows, c.bias_indptr, c.seen_indptr, mask, mask.shape[-1], w.scores, w.adjusted, vocabulary,
            MASKED=masked, CHUNK=tiles.chunk, BLOCK=tiles.block, num_warps=warps,
        )  # fmt: skip
        sparse = (n, tiles.sparse_programs)
        kernel.bias_kernel[sparse](rows, c.bias_indptr, c.bias_ids, c.bias_values, w.scores, vocabulary, BLOCK=tiles.sparse, num_warps=warps)
        kernel.penalty_kernel[sparse](
            rows, c.seen_indptr, c.seen_ids, c.seen_counts, c.repetition, c.presence, c.frequency, w.scores, vocabulary,
            BLOCK=tiles.sparse, num_warps=warps,
        )  # fmt: skip
    source = (logits, stride, w.scores, w.adjusted, rows)
    kernel.stats_kernel[by_chunk](
        *source, w.best, w.best_id, w.bad, w.bad_id, vocabulary, ADJUST=stages.adjust, S=chunks, CHUNK=tiles.chunk, BLOCK=tiles.block, num_warps=warps
    )
    if stages.draw:
        levels = -(-(_KEY_BITS if stages.adjust else _SIGNIFICANT_BITS[logits.dtype]) // tiles.digit)
        last_shift = _KEY_BITS - tiles.digit * levels
        kernel.begin_kernel[(n,)](
            rows, c.temperature, c.top_k, c.top_p, w.best, w.best_id, w.bad, w.mode, w.top, w.cut, w.cut_id, vocabulary,
            S=chunks, PADDED=padded, num_warps=1,
        )  # fmt: skip
        for wanted, by_mass, bound in ((stages.top_k, False, c.top_k), (stages.top_p, True, c.top_p)):
            search = (*source, c.temperature, bound, w.mode, w.top, w.cut, w.cut_id, w.bins, w.state, vocabulary)
            options = dict(
                ADJUST=stages.adjust, BY_MASS=by_mass, S=chunks, PADDED=padded, LEVELS=_KEY_BITS // tiles.digit, RADIX=2**tiles.digit,
                CHUNK=tiles.chunk, BLOCK=tiles.digits, num_warps=warps,
            )  # fmt: skip
            if wanted:
                for level in range(levels):
                    kernel.digit_kernel[by_chunk](*search, level, _KEY_BITS - tiles.digit * (level + 1), last_shift, **options)
                kernel.settle_kernel[(n,)](*search, levels - 1, last_shift, **options)
        kernel.draw_kernel[by_chunk](
            *source, positions, c.temperature, c.min_p, c.seed, c.sample, w.mode, w.top, w.cut, w.cut_id, w.draw, w.draw_id,
            vocabulary, last_shift, int(purpose), ADJUST=stages.adjust, S=chunks, CHUNK=tiles.chunk, BLOCK=tiles.block, num_warps=warps,
        )  # fmt: skip
    kernel.finish_kernel[(n,)](
        logits, stride, rows, c.temperature, slots if slots is not None else rows, w.best, w.best_id, w.bad, w.bad_id, w.draw, w.draw_id,
        tokens, errors, feed if feed is not None else tokens,
        ANY_DRAWN=stages.draw, FEEDS=feed is not None, S=chunks, PADDED=padded, num_warps=1,
    )  # fmt: skip


def error_text(entry: np.ndarray, vocabulary: int) -> str | None:
    """What went wrong with a position, in words, from its three `errors` on the host; None where nothing did."""
    code, first, count = (int(x) for x in entry)
    if code == kernel.FINE.value:
        return None
    if code == kernel.NONE_LEFT.value:
        return "no token is left to draw: every logit is -inf after logit bias, bans and the allowed-token mask"
    what = "nan" if code == kernel.IS_NAN.value else "inf"
    return f"the logit of token {first} is {what} ({count} of {vocabulary} logits are NaN or +inf)"


def logprobs(
    logits: Tensor,
    rows: Tensor,
    asked: Tensor,
    targets: Tensor,
    logprob: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    scratch: Scratch,
    tiles: Tiles = DEFAULT,
) -> None:
    """Log probabilities, of raw logits, of each position's target and of its best alternatives, at the positions whose row asks.

    logits        [n, V] as in `sample`
    rows          [n] int32, negative for padding
    asked         [rows] int32, a row with a negative entry does not ask; positions that don't ask are left as they are
    targets       [n] int32: sampled tokens, or the given next tokens of scored positions; NaN for one outside the vocabulary
    logprob       [n] float64, written
    top_ids       [n, k] int32, written: best first, of equal logits the lowest id first; k from 0 to min(MAX_LOGPROBS, V)
    top_logprobs  [n, k] float64, written

    To 1e-6 of fp64 arithmetic. A position with a NaN or +inf among its logits, or with nothing but -inf, has NaN throughout.
    """
    n, vocabulary = logits.shape
    num_top = top_ids.shape[1]
    scratch.check(n, vocabulary, tiles)
    if num_top > min(MAX_LOGPROBS, vocabulary) or top_logprobs.shape != top_ids.shape or not (top_ids.is_contiguous() and top_logprobs.is_contiguous()):
        raise ValueError(f"{tuple(top_ids.shape)}: at most {min(MAX_LOGPROBS, vocabulary)} alternatives, contiguous")
    if n == 0:
        return
    chunks = -(-vocabulary // tiles.chunk)
    padded = triton.next_power_of_2(chunks)
    source = (logits, logits.stride(0), rows, asked)
    w = scratch
    kernel.peaks_kernel[(n, chunks)](*source, w.peaks, w.bad, vocabulary, num_top, S=chunks, WIDTH=MAX_LOGPROBS, CHUNK=tiles.chunk, num_warps=tiles.warps)
    kernel.mass_kernel[(n, chunks)](
        *source, w.peaks, w.mass, vocabulary, S=chunks, PADDED=padded, WIDTH=MAX_LOGPROBS, CHUNK=tiles.chunk, BLOCK=tiles.block, num_warps=tiles.warps
    )
    kernel.report_kernel[(n,)](
        *source, targets, w.peaks, w.bad, w.mass, logprob, top_ids, top_logprobs, vocabulary, num_top, num_top,
        S=chunks, PADDED=padded, WIDTH=MAX_LOGPROBS, CANDIDATES=padded * MAX_LOGPROBS, num_warps=4,
    )  # fmt: skip
