"""Sampling and log probabilities in plain PyTorch and fp64, a position at a time. Not used by the engine: it says what the kernels compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinfer.noise import LARGEST_UNIFORM, PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, Purpose

_LOW = 0xFFFFFFFF


def gumbel(seed: int, sample: int, position: int, purpose: int, vocabulary: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise of the token ids 0 .. vocabulary - 1, fp64, keyed as twinfer.noise says; seed may be negative (the bits of a uint64)."""
    c0 = torch.arange(-(-vocabulary // 4), device=device)
    c1, c2, c3 = (torch.full_like(c0, value) for value in (position, sample, purpose))
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _product(PHILOX_MULTIPLIERS[0], c0), _product(PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & _LOW, (k1 + PHILOX_KEY_STEPS[1]) & _LOW
    words = torch.stack((c0, c1, c2, c3), dim=1).flatten()[:vocabulary]
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM)
    return -torch.log(-torch.log1p(-uniform))


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * word, whose 64 bits int64 holds only in two halves."""
    low = factor * (word & 0xFFFF)
    high = factor * (word >> 16) + (low >> 16)
    return high >> 16, (high << 16 | low & 0xFFFF) & _LOW


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    tokens: Tensor,
    errors: Tensor,
    feed: Tensor,
    mask: Tensor | None = None,
    purpose: Purpose = Purpose.DRAW,
    **columns: Any,
) -> None:
    """The call of `sampler.sample`, with `sampler.Columns` as arguments of their own; scratch, stages and tiles are not looked at."""
    errors.zero_()
    tokens.zero_()
    c: dict[str, Tensor] = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        raw = logits[i].double()
        bad = (raw.isnan() | (raw == torch.inf)).nonzero().flatten()
        scores = _adjusted(raw, row, mask, c)
        if len(bad):
            errors[i] = torch.tensor([1 if raw[bad[0]].isnan() else 2, int(bad[0]), len(bad)])
        elif scores.max() == -torch.inf:
            errors[i, 0] = 3
        else:
            temperature = float(c["temperature"][row])
            if temperature > 0:
                noise = gumbel(int(c["seed"][row]), int(c["sample"][row]), int(positions[i]), int(purpose), len(raw), raw.device)
                scores = scores / temperature
                left = _kept(scores, int(c["top_k"][row]), float(c["top_p"][row]), float(c["min_p"][row]))
                scores = torch.where(left, scores + noise, -torch.inf)
            tokens[i] = (scores == scores.max()).nonzero()[0, 0]
        if slots[row] >= 0:
            feed[slots[row]] = tokens[i]


def _adjusted(scores: Tensor, row: int, mask: Tensor | None, c: dict[str, Tensor]) -> Tensor:
    """Scores [V] fp64 after the mask, the bias and the penalties of a row."""
    scores = scores.clone()
    if mask is not None:
        t = torch.arange(len(scores), device=scores.device)
        scores[(mask[row, t // 32] >> (t % 32)) & 1 == 0] = -torch.inf
    bias, seen = (slice(int(c[name][row]), int(c[name][row + 1])) for name in ("bias_indptr", "seen_indptr"))
    scores[c["bias_ids"][bias].long()] += c["bias_values"][bias].double()
    ids, count = c["seen_ids"][seen].long(), c["seen_counts"][seen].double()
    repetition, frequency, presence = (float(c[name][row]) for name in ("repetition", "frequency", "presence"))
    s = scores[ids]
    scores[ids] = torch.where(s > 0, s / repetition, s * repetition) - frequency * count - presence * (count > 0)
    return scores


def _kept(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens pass all filters, [V] bool: of the ranking by score, then lower id, the shortest of three beginnings."""
    ranked, order = scores.sort(descending=True, stable=True)
    weight = torch.exp(ranked - ranked[0])
    passes = weight >= min_p
    if top_k > 0:
        passes[top_k:] = False
        weight[top_k:] = 0
    if top_p < 1:
        passes &= weight.cumsum(0) - weight < top_p * weight.sum()
    passes[0] = True
    return torch.zeros_like(passes).scatter(0, order, passes)


def logprobs(
    logits: Tensor, rows: Tensor, asked: Tensor, targets: Tensor, logprob: Tensor, top_ids: Tensor, top_logprobs: Tensor, **workspace: Any
) -> None:
    """The call of `sampler.logprobs`; scratch and tiles are not looked at."""
    for i, row in enumerate(rows.tolist()):
        if row >= 0 and asked[row] >= 0:
            scores = logits[i].double().log_softmax(0)
            logprob[i] = scores[targets[i].long()]
            best, ids = scores.sort(descending=True, stable=True)
            top_ids[i], top_logprobs[i] = ids[: top_ids.shape[1]].int(), best[: top_ids.shape[1]]
