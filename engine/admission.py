"""Admission: everything about a request that can be refused before it is queued, and how many tokens it may have. No scheduling, no allocation.

It needs no executor and no weights, so that a request can be refused before any are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.engine.prompts import Prompt, plain_ids
from twinfer.errors import RequestRefused
from twinfer.limits import Limits
from twinfer.request import Request
from twinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from twinfer.engine.generation_config import GenerationDefaults
    from twinfer.engine.tokenizer import Tokenizer

# The command line's options for limits that a request may run into; the others are set by limits={...} or the environment.
OPTIONS = {"max_context": "--max-context", "num_pages": "--num-pages"}


@dataclass(frozen=True, slots=True)
class Admission:
    """What decides whether a request is taken: the model's shape, the limits, its tokenizer and the checkpoint's defaults (None: it has none)."""

    model: ModelConfig
    limits: Limits
    tokenizer: Tokenizer | None = None
    defaults: GenerationDefaults | None = None

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults (generation_config.json) with overrides."""
        values = dict(self.defaults.sampling_values()) if self.defaults is not None else {}
        return SamplingParams(**{**values, **overrides})

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Makes and checks a Request from text or token ids. Raises RequestRefused."""
        if isinstance(prompt, str) and self.tokenizer is None:
            raise RequestRefused("prompt", prompt, "token ids: this engine has no tokenizer")
        salt = ""
        if isinstance(prompt, Request):
            params, salt = prompt.params if params is None else params, prompt.cache_salt
            prompt = prompt.prompt
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) and self.tokenizer is not None else plain_ids(prompt)
        made = Request(tuple(int(i) if isinstance(i, np.integer) else i for i in ids), params, salt)
        if params is None:
            made = dataclasses.replace(made, params=self._fitting(self.default_params(), len(made.prompt)))
        if not isinstance(made.params, SamplingParams):
            raise RequestRefused("params", made.params, "a SamplingParams or None")
        # A copy: an id that is put into a caller's bias after this check would be an index out of range in a step of many.
        made = dataclasses.replace(made, params=dataclasses.replace(made.params))
        check_request(made, self.limits, self.model.vocab_size, self.ends_of(made.sampling), self.tokenizer is not None)
        max_new_tokens(made, self.limits, self.model.max_position)
        return made

    def _fitting(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Defaults that nobody gave give way: max_tokens is at most the room that the prompt leaves."""
        most = self.room(num_prompt)
        if params.max_tokens is not None and 0 < most < params.max_tokens:
            return dataclasses.replace(params, max_tokens=most)
        return params

    def room(self, num_prompt: int) -> int:
        """Tokens that a request may generate at most after a prompt of so many tokens."""
        return room(num_prompt, self.limits)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The checkpoint's end tokens. It may name some beyond its vocabulary; they are never drawn, and a ban of one would be an index out of range."""
        own = self.defaults.eos_token_ids if self.defaults is not None else ()
        return frozenset(token for token in own if token < self.model.vocab_size)

    def ends_of(self, params: SamplingParams) -> frozenset[int]:
        """Token ids that end a request's output: its own stop tokens, and the model's unless ignored."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.end_tokens


def check_request(request: Request, limits: Limits, vocab_size: int, end_tokens: Iterable[int], has_tokenizer: bool) -> None:
    """Raises RequestRefused naming the field, the value and the limit. `end_tokens` are the ids that will end the request's output."""
    params = request.sampling
    if len(request.prompt) == 0:
        raise RequestRefused("prompt", [], "at least 1 token")
    for index, token in enumerate(request.prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestRefused(f"prompt[{index}]", token, f"a token id from 0 to {vocab_size - 1}")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(params.logit_bias))):
        for token in ids:
            if token >= vocab_size:
                raise RequestRefused(name, token, f"token ids from 0 to {vocab_size - 1}")
    num_bias = len(params.logit_bias) + (len(set(end_tokens)) if params.min_tokens else 0)
    if num_bias > limits.max_logit_bias:
        # min_tokens bans each token that would end the output, so a long list of stop tokens counts as well.
        field, most = "logit_bias" if params.logit_bias else "stop_token_ids", f"at most max_logit_bias = {limits.max_logit_bias}"
        raise RequestRefused(
            field, Count(num_bias, "entry", "entries"), f"{most}, end tokens that min_tokens bans included", raised("max_logit_bias")
        )
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > vocab_size:
            raise RequestRefused(name, asked, f"at most the size of the vocabulary, {vocab_size}")
        if asked is not None and asked > limits.max_logprobs:
            raise RequestRefused(name, asked, f"at most max_logprobs = {limits.max_logprobs}", raised("max_logprobs"))
    if params.stop and not has_tokenizer:
        raise RequestRefused("stop", list(params.stop), "empty: this engine has no tokenizer, so it makes no text to search", "use stop_token_ids")


def max_new_tokens(request: Request, limits: Limits, max_position: int | None = None) -> int:
    """Tokens that the request may generate; refuses what can never fit: the context's limit, then the pool's pages.

    max_position  the model's own limit of a context, for what the refusal says to do

    The last generated token is never computed, so a request holds at most prompt + max_tokens - 1 tokens in pages.
    """
    num_prompt, asked = len(request.prompt), request.sampling.max_tokens
    if num_prompt > limits.max_context:
        raise RequestRefused(
            "prompt", Count(num_prompt, "token"), f"at most max_context = {Count(limits.max_context, 'token')}",
            _more_context(limits, max_position, "a shorter prompt"),
        )
    pool_tokens = limits.num_pages * limits.page_size
    if num_prompt > pool_tokens:
        raise RequestRefused(
            "prompt", Count(num_prompt, "token"), f"at most {Count(pool_tokens, 'token')}, the room in {Count(limits.num_pages, 'page')} of {limits.page_size}",
            f"{raised('num_pages')}; without num_pages more memory (--memory, TWINFER_MEMORY) does",
        )  # fmt: skip
    most = room(num_prompt, limits)
    if asked is None:
        asked = most
    if num_prompt + asked > limits.max_context or most < 1:
        raise RequestRefused(
            "max_tokens", request.sampling.max_tokens,
            f"at most max_context - prompt = {limits.max_context} - {num_prompt} = {Count(limits.max_context - num_prompt, 'token')}",
            _more_context(limits, max_position, "fewer tokens or a shorter prompt"),
        )  # fmt: skip
    if asked > most:
        raise RequestRefused(
            "max_tokens", asked,
            f"at most {most}, the room in {Count(limits.num_pages, 'page')} of {limits.page_size} beside {Count(num_prompt, 'prompt token')}",
            f"{raised('num_pages')}; without num_pages more memory (--memory, TWINFER_MEMORY) does",
        )  # fmt: skip
    return asked


def room(num_prompt: int, limits: Limits) -> int:
    """Tokens that may be generated after a prompt: what the context leaves, and what all pages hold (the last token needs no page)."""
    return min(limits.max_context - num_prompt, limits.num_pages * limits.page_size - num_prompt + 1)


def raised(limit: str) -> str:
    """What raises a limit, as the remedy of a refusal."""
    option = f"{OPTIONS[limit]}, " if limit in OPTIONS else ""
    return f"{option}limits={{'{limit}': N}} or TWINFER_{limit.upper()} raises it"


def _more_context(limits: Limits, max_position: int | None, otherwise: str) -> str:
    if max_position is not None and limits.max_context >= max_position:
        return f"that is the model's own limit (max_position_embeddings), which nothing raises: take {otherwise}"
    most = "" if max_position is None else f", up to the model's {max_position}"
    return raised("max_context") + most

