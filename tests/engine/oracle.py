"""What one sample of a request must give under the ghost's model, computed without an engine: tokens, reason, and the columns of its rows. Not a test."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from twinfer.engine.ghost import mix, next_token
from twinfer.limits import Limits, ceil_div
from twinfer.plan import SamplingColumns
from twinfer.request import FinishReason
from twinfer.sampling import SamplingParams

from .ghosts import VOCAB

SLACK = 4  # tokens known beyond the end, for rows that were launched before the end was read


def continuation(prompt: tuple[int, ...], num_tokens: int, params: SamplingParams, sample: int) -> list[int]:
    """What the ghost's model writes after `prompt` when nothing ends it. `params.seed` is given unless greedy."""
    history = 0
    for token in prompt:
        history = mix(history, token)
    out: list[int] = []
    while len(out) < num_tokens:
        out.append(next_token(history, params.seed or 0, sample, params.temperature == 0, VOCAB))
        history = mix(history, out[-1])
    return out


def room(num_prompt: int, limits: Limits) -> int:
    """Tokens that fit behind a prompt: its last one is never written."""
    return min(limits.max_context - num_prompt, limits.num_pages * limits.page_size + 1 - num_prompt)


def fits(num_prompt: int, max_tokens: int | None, limits: Limits) -> bool:
    """Whether a request can ever run to its end, counted in pages."""
    asked = 1 if max_tokens is None else max_tokens
    pages = ceil_div(num_prompt + asked - 1, limits.page_size)
    return num_prompt + asked <= limits.max_context and pages <= limits.num_pages


@dataclass(frozen=True)
class Expected:
    """One sample: what it writes when nothing ends it, what it gives, and why it ends."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sample: int
    raw: list[int]
    tokens: list[int]
    reason: FinishReason

    @classmethod
    def of(cls, prompt: tuple[int, ...], params: SamplingParams, sample: int, limits: Limits) -> Expected:
        """Follows the rule: an end token ends the output once min_tokens tokens stand before it; else max_tokens or the room does."""
        most = room(len(prompt), limits) if params.max_tokens is None else params.max_tokens
        raw = continuation(prompt, most + SLACK, params, sample)
        for count in range(params.min_tokens + 1, most + 1):
            if raw[count - 1] in params.stop_token_ids:
                return cls(prompt, params, sample, raw, raw[:count], FinishReason.STOP)
        return cls(prompt, params, sample, raw, raw[:most], FinishReason.LENGTH)

    def history(self) -> list[int]:
        """The true tokens, prompt first, as far as any row may reach."""
        return [*self.prompt, *self.raw]

    def check_columns(self, sampling: SamplingColumns, row: int, end: int, samples: bool) -> None:
        """The row's parameters are this sample's own; `end` is the position that is sampled for, if the row samples."""
        params = self.params
        own = {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "sample": self.sample,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        }
        given = {name: getattr(sampling, name)[row].item() for name in own}
        assert given == own, f"the row's parameters are {given}, its sample's are {own}"
        assert params.seed is None or int(sampling.seed[row]) == params.seed
        num_generated = end - len(self.prompt)
        bias, seen = {}, {}
        if samples:
            bias = dict(params.logit_bias)
            if num_generated < params.min_tokens:
                bias |= dict.fromkeys(params.stop_token_ids, -math.inf)
            if params.has_penalties:
                count = Counter(self.raw[:num_generated])
                seen = {token: count[token] for token in {*self.prompt, *count}}
        at = slice(sampling.bias_indptr[row], sampling.bias_indptr[row + 1])
        assert dict(zip(sampling.bias_ids[at].tolist(), sampling.bias_values[at].tolist(), strict=True)) == bias
        at = slice(sampling.seen_indptr[row], sampling.seen_indptr[row + 1])
        assert dict(zip(sampling.seen_ids[at].tolist(), sampling.seen_counts[at].tolist(), strict=True)) == seen
        assert len(sampling.seen_ids[at]) == len(seen), "a token is listed twice"


def mark(sequence: int, position: int) -> float:
    """A log probability that belongs to one position of one sequence and to no other, so that a mix-up shows."""
    return -float(sequence * 10_000 + position + 1)


def marks(sequences: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Marks of `counts[i]` positions from `firsts[i]` on, of `sequences[i]`, row after row; float64."""
    rows = zip(sequences.tolist(), firsts.tolist(), counts.tolist(), strict=True)
    return np.array([mark(sequence, first + i) for sequence, first, count in rows for i in range(count)], np.float64)
