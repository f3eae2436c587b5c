"""SamplingParams: how the tokens of a request are chosen, checked on construction. Not the arithmetic, which is each engine's sampler.

Order of the arithmetic: logit bias and bans, then penalties (repetition, frequency, presence), then temperature, top-k, top-p, min-p
(the order of transformers' warpers), then one Gumbel draw. Log probabilities that are reported are those of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinfer.errors import RequestRefused

MAX_SEED = 2**64 - 1
# The range of the float32 columns in which plans carry these numbers: beyond it a finite number would become an infinity or a zero.
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126
MAX_SAMPLES = 1024  # samples of one request: each is a row of its own, so the batch bounds the work and this the bookkeeping


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises RequestRefused (a ValueError) that names the field, the value and the limit.

    max_tokens          tokens to generate at most; None: up to the context's end
    temperature         0 is greedy: the highest logit, the lowest index of a tie
    top_k               keep the k best; 0 keeps all
    top_p               keep the smallest set of best tokens whose probabilities reach p; 1 keeps all
    min_p               drop tokens below min_p times the best probability; 0 keeps all
    seed                0..2^64-1; None: the engine gives one (reproducible from the engine's seed and the request's number). Noise is keyed by seed,
                        sample and position: requests with one seed draw the same noise at equal positions, so independent ones want seeds of their own
    n                   independent samples of the same prompt; sample i draws other noise than sample j
    repetition_penalty  divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off
    presence_penalty    subtracted once from tokens seen in the output
    frequency_penalty   subtracted once per occurrence in the output
    logit_bias          token id -> added to its logit, finite or -inf (a ban)
    min_tokens          before so many tokens no stop token is drawn and no stop string ends the output
    stop                strings that end the output; cut from the text unless include_stop
    stop_token_ids      token ids that end the output
    ignore_eos          do not stop at the model's own end tokens
    logprobs            None, or how many alternatives to report for each generated token (0: only the token's own)
    prompt_logprobs     the same for the prompt's tokens; such a request computes its whole prompt and takes no prefix hit
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _real("temperature", self.temperature, 0.0, FLOAT32_MAX, "a number from 0 to the largest float32")
        _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _integer("n", self.n, 1, MAX_SAMPLES, "send several requests for more samples")
        _real("repetition_penalty", self.repetition_penalty, FLOAT32_TINY, FLOAT32_MAX, "a number above 0 in float32's normal range")
        _real("presence_penalty", self.presence_penalty, -FLOAT32_MAX, FLOAT32_MAX, "a finite number in float32's range")
        _real("frequency_penalty", self.frequency_penalty, -FLOAT32_MAX, FLOAT32_MAX, "a finite number in float32's range")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestRefused("logit_bias", self.logit_bias, "a mapping of token id to number")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -math.inf <= bias <= FLOAT32_MAX:
                raise RequestRefused(f"logit_bias[{token}]", bias, "a number in float32's range or -inf")
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestRefused("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}", "raise max_tokens (--max-tokens) too")
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else given
        if not isinstance(stop, tuple | list) or not all(isinstance(s, str) for s in stop):
            raise RequestRefused("stop", self.stop, "a string or a list of strings")
        if any(s == "" for s in stop):
            raise RequestRefused("stop", list(stop), "strings of length at least 1")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestRefused("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise RequestRefused(name, getattr(self, name), "true or false")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0)

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens were seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(name: str, value: object, low: int, high: int | None = None, remedy: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        above = isinstance(value, int) and high is not None and value > high
        raise RequestRefused(name, value, limit, remedy if above else "")


def _real(name: str, value: object, low: float, high: float, limit: str, open_low: bool = False) -> None:
    # Comparisons, not isfinite: an integer of 400 digits is no float, and a NaN fails every comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or (open_low and value == low):
        raise RequestRefused(name, value, limit)
