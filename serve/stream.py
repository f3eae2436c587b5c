"""Runs one request on an engine and hands out its events as they come, with what statistics need. It prints nothing and stops cleanly on Ctrl-C."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinfer.count import Count
from twinfer.request import Event, FinishReason, TokenLogprob
from twinfer.sampling import SamplingParams
from twinfer.serve.interrupt import Interrupt

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine
    from twinfer.engine.tokenizer import Tokenizer


@dataclass(slots=True)
class Sample:
    """One sample as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Run:
    """One request and what came of it. `seconds` are from its submission to its end, `first` to its first token (NaN without one)."""

    num_prompt: int
    samples: list[Sample]
    num_cached: int = 0
    seconds: float = 0.0
    first: float = math.nan
    interrupted: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def error(self) -> str | None:
        """Of the first sample that ended with one."""
        return next((sample.error or "unknown" for sample in self.samples if sample.finish is FinishReason.ERROR), None)

    def statistics(self) -> str:
        """One line for people."""
        rate = f"{self.num_tokens / self.seconds:.1f} tok/s" if self.seconds > 0 else "-"
        if not math.isnan(self.first):
            rate += f", first after {self.first:.2f} s"
        finish = ", ".join(dict.fromkeys(str(sample.finish) for sample in self.samples))
        return (
            f"{Count(self.num_tokens, 'token')} in {self.seconds:.2f} s ({rate}); "
            f"prompt {Count(self.num_prompt, 'token')}, {self.num_cached} from the prefix cache; finish: {finish}"
        )


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams, show: Callable[[Event], None]) -> Run:
    """Runs a request to its end; `show` sees each event. Ctrl-C aborts it between steps: `interrupted` is set, all samples have a finish reason.

    Raises RequestRefused before anything is queued, ExecutorLost when the engine is gone. The engine must have no other request.
    """
    result = Run(len(prompt), [Sample() for _ in range(params.n)])
    with Interrupt() as interrupt:
        begin = time.perf_counter()
        request_id = engine.add(prompt, params)
        terminal = False
        while not terminal:
            if interrupt.asked and not result.interrupted:
                result.interrupted = True
                engine.abort(request_id)
            for event in engine.step():
                sample = result.samples[event.sample]
                if event.tokens and not result.num_tokens:
                    result.first = time.perf_counter() - begin
                sample.text += event.text
                sample.tokens += event.tokens
                sample.logprobs += event.logprobs or ()
                sample.finish, sample.error = event.finish_reason, event.error
                # Samples of one prompt share its pages: the first one says what was there before the request.
                if event.sample == 0:
                    result.num_cached = event.num_cached_tokens
                terminal = event.terminal
                show(event)
        result.seconds = time.perf_counter() - begin
    return result


def with_room(params: SamplingParams, room: int) -> SamplingParams:
    """`params` with max_tokens lowered to the room that the prompt leaves in context and pages, if it leaves any. The end of a reply by it is LENGTH."""
    if room < 1 or (params.max_tokens is not None and params.max_tokens <= room):
        return params
    return dataclasses.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """One token as text, or as its id where there is no tokenizer."""
    return str(token) if tokenizer is None else tokenizer.decode([token], False)


def logprob_record(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One token's log probabilities as JSON values; -inf, which JSON lacks, is null, and so is a text without a tokenizer."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = None if tokenizer is None else token_text(token, tokenizer)
        return {"token": token, "text": text, "logprob": logprob if math.isfinite(logprob) else None}

    return {**one(entry.token, entry.logprob), "top": [one(token, logprob) for token, logprob in entry.top]}
