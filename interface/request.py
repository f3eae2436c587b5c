"""Request and what comes back of it: events with tokens, text and a finish reason. Values only; the life of a request is the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinfer.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the engine could not go on with it; `Event.error` says why


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids and how to go on from it. `cache_salt` keeps its pages from requests with another salt (tenants).

    params  None: the checkpoint's own defaults, with max_tokens cut to the room that the prompt leaves
    """

    prompt: tuple[int, ...]
    params: SamplingParams | None = None
    cache_salt: str = ""

    @property
    def sampling(self) -> SamplingParams:
        """`params`, or SamplingParams() where the engine has not put the checkpoint's defaults there."""
        return self.params if self.params is not None else SamplingParams()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (nats, of the raw logits) of one token and of the `top` alternatives (token id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one step brought for one sample of one request.

    tokens         token ids generated since the last event of this sample
    text           text that they add, whole characters only (empty without a tokenizer)
    logprobs       one entry a token when asked for
    prompt_logprobs  entries for prompt positions 1.., on the sample's first event, when asked for
    finish_reason  set on the last event of the sample
    terminal       set on exactly one event of each accepted request: its last
    num_cached_tokens  prompt tokens that came from the prefix cache
    """

    request_id: int
    sample: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    terminal: bool = False
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample: tokens, text, why it ended, and log probabilities when asked for."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """All samples of one request, in sample order, with the prompt's ids and, when asked for, its log probabilities."""

    request_id: int
    prompt: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.completions[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the first sample."""
        return self.completions[0].tokens
