"""LiveRequests: requests between acceptance and their terminal event, and what is told of them. It neither plans nor computes.

Every accepted request gets exactly one terminal event: `_end` is the only place that makes one, and takes the request out as it does.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.admission import Admission
from twinfer.engine.prompts import Prompt
from twinfer.engine.sample import SampleStream, token_logprob
from twinfer.engine.scheduler import Progress, Scheduler
from twinfer.engine.sequence import Sequence as Sample
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import ExecutorLost
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request, TokenLogprob
from twinfer.sampling import SamplingParams


@dataclass(slots=True)
class _Live:
    """A request between acceptance and its terminal event. `open` maps sample index to its text stream."""

    id: int
    request: Request
    open: dict[int, SampleStream]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class LiveRequests:
    """Requests are added to `scheduler` as `admission` lets them; `seed` is what requests without one get theirs from. `lost`: why no more are taken."""

    def __init__(self, scheduler: Scheduler, admission: Admission, tokenizer: Tokenizer | None, seed: int) -> None:
        self.scheduler, self.admission, self.tokenizer, self.seed = scheduler, admission, tokenizer, seed
        self.end_tokens = admission.end_tokens
        self.lost: str | None = None
        self._live: dict[int, _Live] = {}
        self._events: list[Event] = []  # for the next `step`
        self._inboxes: dict[int, deque[Event]] = {}  # of requests that a `stream` or `generate` waits for
        self._dropped: deque[int] = deque()  # requests whose stream nobody holds any more; appended to from anywhere
        self._next_request = 0
        self.num_told = 0  # terminal events

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.scheduler.has_work or bool(self._events)

    @property
    def num_accepted(self) -> int:
        """Requests that were taken."""
        return self._next_request

    @property
    def num_live(self) -> int:
        """Requests without a terminal event."""
        return len(self._live)

    def default_params(self, **overrides: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults (generation_config.json) with overrides."""
        return self.admission.default_params(**overrides)

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Makes and checks a Request from text or token ids. Raises RequestRefused before anything is queued or allocated."""
        return self.admission.request(prompt, params)

    def room(self, num_prompt: int) -> int:
        """Tokens that a request may generate at most after a prompt of so many tokens."""
        return self.admission.room(num_prompt)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id. Raises RequestRefused (a ValueError), or ExecutorLost when the engine is no longer healthy."""
        if self.lost is not None:
            raise ExecutorLost(self.lost)
        request = self.request(prompt, params)
        request_id = self._next_request
        self._next_request += 1
        params = request.sampling
        seed = params.seed if params.seed is not None else _derived_seed(self.seed, request_id)
        live = _Live(request_id, request, {})
        self._live[request_id] = live
        for sample in range(params.n):
            # The prompt is the same for all samples, so only the first one scores it.
            own = request if sample == 0 else dataclasses.replace(request, params=dataclasses.replace(params, prompt_logprobs=None))
            leader = live.open[0].sequence if sample else None
            sequence = self.scheduler.add(own, request_id, sample, seed, self.admission.ends_of(params), leader)
            live.open[sample] = SampleStream(sequence, self.tokenizer)
        return request_id

    def abort(self, request_id: int) -> bool:
        """Ends a request: its terminal event comes with the next `step`. False if it has ended already.

        Its pages are free when this returns, or when the steps in flight that write them are over.
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        streams = list(live.open.values())
        self.scheduler.drop([s.sequence for s in streams])
        for stream in streams:
            self._end(stream.sequence, FinishReason.ABORT, text=stream.flush())
        return True

    def _forget(self, request_id: int) -> None:
        """Nobody waits for the request any more: it ends, and its remaining events go nowhere."""
        self.abort(request_id)
        self._inboxes.pop(request_id, None)

    # ---- what is told ------------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        """Puts an event where it is waited for."""
        self.num_told += event.terminal
        self._inboxes.get(event.request_id, self._events).append(event)

    def _tell(self, plan: StepPlan, output: StepOutput, progress: Progress, sampled: NDArray[np.int64], scored: NDArray[np.int64]) -> None:
        """Turns one row's progress into an event."""
        sequence, row, token = progress.sequence, progress.row, progress.token
        live = self._live[sequence.request_id]
        if plan.num_scored[row]:
            self._score(plan, output, row, int(scored[row]), live)
        if token is None:
            return
        stream = live.open[sequence.sample]
        pushed = stream.push(token, progress.finish)
        if pushed.finish is not None and progress.finish is None:
            self.scheduler.drop([sequence])
        logprobs = None
        if sequence.params.logprobs is not None and output.sampled is not None:
            logprobs = (token_logprob(output.sampled, int(sampled[row]), token, sequence.params.logprobs),)
        first = sequence.num_generated == 1
        prompt_logprobs = tuple(live.prompt_logprobs) if first and sequence.params.prompt_logprobs is not None else None
        if pushed.finish is None:
            cached = sequence.num_cached
            self._emit(Event(sequence.request_id, sequence.sample, (token,), pushed.text, logprobs, prompt_logprobs, num_cached_tokens=cached))
        else:
            self._end(sequence, pushed.finish, pushed.text, (token,), logprobs, prompt_logprobs)

    def _score(self, plan: StepPlan, output: StepOutput, row: int, at: int, live: _Live) -> None:
        """Keeps the log probabilities of prompt tokens that this row scored (a preempted prompt is scored again: what is known is skipped)."""
        assert output.scored is not None, "rows with scored positions have scores"
        first = int(plan.start[row])
        for i in range(int(plan.num_scored[row])):
            if first + i == len(live.prompt_logprobs):
                entry = token_logprob(output.scored, at + i, int(plan.targets[at + i]), int(plan.scored_logprobs[row]))
                live.prompt_logprobs.append(entry)

    def _end(
        self,
        sequence: Sample,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
        error: str | None = None,
    ) -> None:
        """The last event of a sample, and of its request when no other sample is open."""
        live = self._live[sequence.request_id]
        del live.open[sequence.sample]
        terminal = not live.open
        if terminal:
            del self._live[sequence.request_id]
        self._emit(
            Event(
                sequence.request_id,
                sequence.sample,
                tokens,
                text,
                logprobs,
                prompt_logprobs,
                finish_reason=reason,
                terminal=terminal,
                error=error,
                num_cached_tokens=sequence.num_cached,
            )
        )


def _derived_seed(engine_seed: int, request_id: int) -> int:
    """A request's seed when it names none: splitmix64's finaliser over engine seed and request number, so that neighbours are unrelated."""
    value = (engine_seed + (request_id + 1) * 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
