"""From logits to tokens and log probabilities, one row at a time in fp64. It decides nothing: what a row wants stands in the plan.

Order: logit bias and bans, allowed-token mask, penalties, temperature (0: the best token, the lowest id of a tie), top-k, top-p, min-p, one Gumbel
draw. Each position is computed by itself from a vector of logits, so its token can't depend on its neighbours. With one seed, transformers and
twinfer draw different tokens of the same distribution.

Where tokens tie at a filter's edge, the lower ids are kept: exactly k tokens pass top-k, and the smallest set passes top-p. transformers keeps every
token that ties with the k-th, and of a tie at the edge of top-p whichever ids its sort puts last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinfer.errors import RequestRefused
from twinfer.noise import Purpose
from twinfer.output import LogprobColumns
from twinfer.plan import SamplingColumns
from twinfer.reference.philox import gumbel_noise, uniform_words

I32 = NDArray[np.int32]
IntArray = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """tokens [n] int32; errors: index into the n positions -> what is wrong with its logits. A token with an error is 0, meaningless."""

    tokens: I32
    errors: dict[int, str]


def sample(
    logits: Tensor,
    rows: IntArray,
    positions: IntArray,
    sampling: SamplingColumns,
    mask: NDArray[np.uint32] | None = None,
    purpose: Purpose = Purpose.DRAW,
) -> SampleResult:
    """One token for each of n positions.

    logits     [n, vocabulary] floating point, any device; not changed
    rows       [n], the plan's row of each position
    positions  [n], absolute position of the token to draw (that of the token whose logits these are, plus one): it keys the noise
    mask       [num_rows, words] uint32, the plan's allowed-token mask, bit i of word j is token 32 j + i; None allows all
    purpose    what the noise is drawn for

    A NaN or +inf among the logits, or no token left to draw, is an error of that position alone. Penalties use the row's `seen` tokens at each of its
    positions.
    """
    drawn = np.flatnonzero(sampling.temperature[rows] > 0)
    words = uniform_words(sampling.seed[rows[drawn]], sampling.sample[rows[drawn]], positions[drawn], purpose, logits.shape[1], logits.device)
    noise = dict(zip(drawn.tolist(), gumbel_noise(words), strict=True))
    tokens = np.zeros(len(rows), np.int32)
    errors: dict[int, str] = {}
    for i, row in enumerate(rows.tolist()):
        scores = logits[i].double()
        error = not_finite(scores)
        if error is None:
            allowed = scores if mask is None else apply_mask(scores, mask[row])
            scores = penalise(apply_bias(allowed, row, sampling), row, sampling)
            if scores.max() == -torch.inf:
                error = "no token is left to draw: every logit is -inf after logit bias, bans and the allowed-token mask"
        if error is None:
            tokens[i] = draw(scores, row, sampling, noise[i]) if i in noise else first_argmax(scores)
        else:
            errors[i] = error
    return SampleResult(tokens, errors)


def not_finite(scores: Tensor) -> str | None:
    """What is wrong with a vector of logits, [vocabulary]: a NaN or +inf. -inf is a ban that the model may express."""
    bad = (scores.isnan() | (scores == torch.inf)).nonzero().flatten().tolist()
    if not bad:
        return None
    return f"the logit of token {bad[0]} is {float(scores[bad[0]])} ({len(bad)} of {len(scores)} logits are NaN or +inf)"


def apply_bias(scores: Tensor, row: int, sampling: SamplingColumns) -> Tensor:
    """Adds the row's logit bias, [vocabulary] fp64; a bias of -inf bans the token."""
    span = slice(int(sampling.bias_indptr[row]), int(sampling.bias_indptr[row + 1]))
    ids = torch.from_numpy(sampling.bias_ids[span].astype(np.int64)).to(scores.device)
    values = torch.from_numpy(sampling.bias_values[span].astype(np.float64)).to(scores.device)
    return scores.index_add(0, ids, values)


def apply_mask(scores: Tensor, words: NDArray[np.uint32]) -> Tensor:
    """Bans the tokens whose bit is 0. Words may cover a padded vocabulary; bits past the logits are not read."""
    token = torch.arange(len(scores), device=scores.device)
    word = torch.from_numpy(words.astype(np.int64)).to(scores.device)[token // 32]
    return scores.masked_fill((word >> (token % 32)) & 1 == 0, -torch.inf)


def penalise(scores: Tensor, row: int, sampling: SamplingColumns) -> Tensor:
    """Repetition over all seen tokens, then frequency times count and presence over those with a count (in the output), [vocabulary] fp64."""
    span = slice(int(sampling.seen_indptr[row]), int(sampling.seen_indptr[row + 1]))
    ids = torch.from_numpy(sampling.seen_ids[span].astype(np.int64)).to(scores.device)
    count = torch.from_numpy(sampling.seen_counts[span].astype(np.float64)).to(scores.device)
    repetition, frequency, presence = float(sampling.repetition[row]), float(sampling.frequency[row]), float(sampling.presence[row])
    seen = scores[ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    return scores.index_copy(0, ids, seen - frequency * count - presence * (count > 0))


def draw(scores: Tensor, row: int, sampling: SamplingColumns, noise: Tensor) -> int:
    """The token of one position from its penalised logits, [vocabulary] fp64 with at least one above -inf, and Gumbel noise in the same shape."""
    scores = scores / float(sampling.temperature[row])  # in fp64 no temperature that is a float32 overflows
    kept = kept_tokens(scores, int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row]))
    perturbed = torch.full_like(scores, -torch.inf)
    perturbed[kept] = (scores + noise)[kept]
    return first_argmax(perturbed)


def first_argmax(scores: Tensor) -> int:
    """Lowest index of the largest value; torch.argmax leaves open which index of a tie it gives."""
    return int((scores == scores.max()).nonzero()[0])


def kept_tokens(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids that pass top-k, then top-p among those, then min-p, best first, int64; at least one.

    Ranked by score, lower id first in a tie, every filter keeps the beginning of the ranking, so together they keep the shortest of three beginnings.
    top-p keeps a token while the tokens before it have less than p together; min-p compares with the best token, so what was filtered before has no
    say.
    """
    ranked, order = scores.sort(descending=True, stable=True)
    if top_k > 0:
        ranked = ranked[:top_k]
    probability = ranked.softmax(0)
    num_kept = len(ranked)
    if top_p < 1:
        before = torch.cat([probability.new_zeros(1), probability.cumsum(0)[:-1]])
        num_kept = min(num_kept, int((before < top_p).sum()))
    num_kept = min(num_kept, int((probability >= min_p * probability[0]).sum()))
    return order[: max(1, num_kept)]  # a top_p that underflows to 0 still keeps the best


def logprobs(logits: Tensor, tokens: IntArray, num_top: int) -> LogprobColumns:
    """Log probabilities, in fp64, of `tokens` [n] and of the `num_top` best under raw logits [n, vocabulary].

    Raises RequestRefused when num_top exceeds the vocabulary. A row with a NaN gives NaN there and nowhere else.
    """
    vocabulary = logits.shape[1]
    if num_top > vocabulary:
        raise RequestRefused("logprobs", num_top, f"at most the size of the vocabulary, {vocabulary}")
    scores = logits.double().log_softmax(1)
    chosen = scores.gather(1, torch.from_numpy(tokens.astype(np.int64)).to(scores.device)[:, None])[:, 0]
    best, ids = scores.sort(dim=1, descending=True, stable=True)
    return LogprobColumns(chosen.cpu().numpy(), ids[:, :num_top].int().cpu().numpy(), best[:, :num_top].cpu().numpy())
