"""check_request: everything about a request that can be refused before it is queued. No scheduling, no allocation."""

from __future__ import annotations

from collections.abc import Iterable

from twinfer.errors import RequestRefused
from twinfer.limits import Limits
from twinfer.request import Request


def check_request(request: Request, limits: Limits, vocab_size: int, end_tokens: Iterable[int], has_tokenizer: bool) -> None:
    """Raises RequestRefused naming the field, the value and the limit. `end_tokens` are the ids that will end the request's output."""
    params = request.params
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
