"""Everything about a request that can be refused before it is queued, and how many tokens it may have. No scheduling, no allocation."""

from __future__ import annotations

from collections.abc import Iterable

from twinfer.errors import RequestRefused
from twinfer.limits import Limits
from twinfer.request import Request


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
        raise RequestRefused("logit_bias", f"{num_bias} entries (bans of min_tokens included)", f"at most max_logit_bias = {limits.max_logit_bias}")
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        most = min(limits.max_logprobs, vocab_size)
        if asked is not None and asked > most:
            raise RequestRefused(name, asked, f"at most {most}")
    if params.stop and not has_tokenizer:
        raise RequestRefused("stop", list(params.stop), "empty: this engine has no tokenizer, so it makes no text to search")


def max_new_tokens(request: Request, limits: Limits) -> int:
    """Tokens that the request may generate; refuses what can never fit: the context's limit, then the pool's pages.

    The last generated token is never computed, so a request holds at most prompt + max_tokens - 1 tokens in pages.
    """
    num_prompt, asked = len(request.prompt), request.sampling.max_tokens
    if num_prompt > limits.max_context:
        raise RequestRefused("prompt", f"{num_prompt} tokens", f"at most max_context = {limits.max_context} tokens")
    pool_tokens = limits.num_pages * limits.page_size
    if num_prompt > pool_tokens:
        raise RequestRefused("prompt", f"{num_prompt} tokens", f"at most {pool_tokens} tokens, all that {limits.num_pages} pages hold")
    most = room(num_prompt, limits)
    if asked is None:
        asked = most
    if num_prompt + asked > limits.max_context or most < 1:
        raise RequestRefused("max_tokens", request.sampling.max_tokens, f"at most max_context - prompt = {limits.max_context} - {num_prompt} tokens")
    if asked > most:
        raise RequestRefused(
            "max_tokens", asked, f"at most {most}, what {limits.num_pages} pages of {limits.page_size} hold beside {num_prompt} prompt tokens"
        )
    return asked


def room(num_prompt: int, limits: Limits) -> int:
    """Tokens that may be generated after a prompt: what the context leaves, and what all pages hold (the last token needs no page)."""
    return min(limits.max_context - num_prompt, limits.num_pages * limits.page_size - num_prompt + 1)
