"""SampleStream: turns one sample's tokens into text, stop strings and events. It never decides about pages or steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinfer.engine.detokenizer import Detokenizer
from twinfer.engine.sequence import Sequence
from twinfer.engine.stop import StopMatcher
from twinfer.engine.tokenizer import Tokenizer
from twinfer.output import LogprobColumns
from twinfer.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Pushed:
    """Text to give out, and the reason to end when a stop string was found."""

    text: str
    finish: FinishReason | None


class SampleStream:
    """Text side of one sequence; without a tokenizer its text is always empty."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        params = sequence.params
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop) if params.stop else None

    def push(self, token: int, finish: FinishReason | None) -> Pushed:
        """Takes one generated token. `finish` is why the scheduler ended the sequence with it, if it did; an end token adds no text."""
        if self._detokenizer is None:
            return Pushed("", finish)
        ended_by_token = finish is FinishReason.STOP
        text = "" if ended_by_token else self._detokenizer.push([token])
        if finish is not None:
            text += self._detokenizer.finish()
        if self._stops is None:
            return Pushed(text, finish)
        emit, matched = self._stops.push(text, armed=self.sequence.num_generated > self.sequence.params.min_tokens)
        if matched is not None:
            return Pushed(emit, FinishReason.STOP)
        if finish is not None:
            emit += self._stops.finish()
        return Pushed(emit, finish)

    def flush(self) -> str:
        """Text held back so far, for a sample that ends without a token of its own (abort, error)."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        armed = self.sequence.num_generated > self.sequence.params.min_tokens
        emit, matched = self._stops.push(text, armed=armed)
        return emit if matched is not None else emit + self._stops.finish()


def token_logprob(columns: LogprobColumns, at: int, token: int, num_alternatives: int) -> TokenLogprob:
    """Entry `at` of an executor's log probabilities, with as many alternatives as this request asked for."""
    ids, values = columns.top_ids[at, :num_alternatives], columns.top_logprobs[at, :num_alternatives]
    top = tuple(zip(np.asarray(ids).tolist(), np.asarray(values).tolist(), strict=True))
    return TokenLogprob(token, float(columns.logprob[at]), top)
