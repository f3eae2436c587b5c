"""Engine: the loop. Takes requests, lets the scheduler plan, the auditor check and the executor compute, and turns tokens into events.

One step: plan -> audit -> launch -> collect -> commit -> events. Both engines are this class with a different Executor. With look-ahead, up to
`limits.look_ahead` further steps are planned and launched before the oldest is collected.

Every accepted request gets exactly one terminal event, whatever fails:
  (a) a plan that breaks a bound or law is refused before launch; the rows that cause it end with an error, the others are planned again;
  (b) StepFailed: the rows of that step end with an error (and with them their rows in later steps in flight), their pages are freed unsealed,
      nobody else is touched;
  (c) anything else from an executor means that it is lost: every request ends with an error at once and `healthy` is false from then on.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.engine.admission import Admission
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.prompts import Prompt, as_prompts
from twinfer.engine.results import ProgressBar, joined
from twinfer.engine.sample import SampleStream, token_logprob
from twinfer.engine.scheduler import Progress, Scheduler
from twinfer.engine.sequence import Sequence as Sample
from twinfer.engine.stream import EventStream
from twinfer.engine.tokenizer import Tokenizer
from twinfer.engine.trace import Trace
from twinfer.errors import BoundViolation, ExecutorLost, LawViolation, RequestRefused, StepFailed
from twinfer.executor import Executor
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, GenerateResult, Request, TokenLogprob
from twinfer.sampling import SamplingParams


@dataclass(slots=True)
class _Live:
    """A request between acceptance and its terminal event. `open` maps sample index to its text stream."""

    id: int
    request: Request
    open: dict[int, SampleStream]
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


class Engine:
    """A language model that serves many requests at once.

    executor      what computes
    model, limits shape of the model and what a step may hold
    tokenizer     None: token ids in, token ids out
    defaults      the checkpoint's end tokens and sampling defaults
    seed          from which requests without a seed get theirs
    prefix_cache  False: pages are never shared
    audit         "step" (cheap checks, the default) or "full" (exhaustive, before and after every step); TWINFER_AUDIT=1 makes it full
    """

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        limits: Limits,
        *,
        ledger: Ledger,
        tokenizer: Tokenizer | None = None,
        defaults: GenerationDefaults | None = None,
        seed: int = 0,
        prefix_cache: bool = True,
        audit: str | None = None,
    ) -> None:
        self.executor, self.model, self.limits, self.tokenizer = executor, model, limits, tokenizer
        self.ledger = ledger
        self.defaults = defaults
        self.admission = Admission(model, limits, tokenizer, defaults)
        self.end_tokens = self.admission.end_tokens
        self.seed = seed
        self.scheduler = Scheduler(limits, partial(ledger.host, owner="engine"), prefix_cache=prefix_cache)
        pages, slots = self.scheduler.page_state, self.scheduler.slot_state
        self.auditor = Auditor(limits, model, level=audit if audit is not None else "step", pages=pages, slots=slots)
        self.trace: Trace | None = None
        self.lost: str | None = None
        self.num_steps = 0
        self._in_flight: deque[StepPlan] = deque()  # launched, not collected, oldest first
        self._live: dict[int, _Live] = {}
        self._events: list[Event] = []  # for the next `step`
        self._inboxes: dict[int, deque[Event]] = {}  # of requests that a `stream` or `generate` waits for
        self._dropped: deque[int] = deque()  # requests whose stream nobody holds any more; appended to from anywhere
        self._next_request = 0

    # ---- requests ------------------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """False from the moment the executor was lost."""
        return self.lost is None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.scheduler.has_work or bool(self._events)

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

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Runs one step and returns what it brought. Never raises for a request's or the executor's failure: those are events.

        Events of requests that a `stream` or `generate` waits for go there and not here.
        """
        self._advance()
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        """One step. Whatever breaks outside the three classes, an interrupt at any line included, leaves state that can't be trusted: that is loss."""
        if self.lost is not None:
            return
        try:
            while self._dropped:
                self._forget(self._dropped.popleft())
            plan = self._plan()
            if plan is not None:
                self._launch(plan)
            if self._in_flight and (plan is None or len(self._in_flight) > self.limits.look_ahead):
                self._finish(self._in_flight[0])
        except BaseException as error:
            self._lose(error)
            # An interrupt is the caller's; in a full audit a broken law of ours is for the person who runs it.
            if not isinstance(error, Exception) or (isinstance(error, LawViolation) and self.auditor.level == "full"):
                raise

    def _emit(self, event: Event) -> None:
        """Puts an event where it is waited for."""
        self._inboxes.get(event.request_id, self._events).append(event)

    def _wait(self, request_id: int) -> Event:
        """The next event of a request with an inbox, stepping until there is one."""
        inbox = self._inboxes[request_id]
        while not inbox:
            if not self.scheduler.has_work:
                raise LawViolation("one terminal event", f"request {request_id} is waited for, but no work is left that could end it")
            self._advance()
        return inbox.popleft()

    def _plan(self) -> StepPlan | None:
        """A plan that passed the auditor. Each refused plan ends at least one sequence, so this comes to an end."""
        while True:
            plan = self.scheduler.plan()
            if plan is None:
                return None
            try:
                self.auditor.audit(plan, self.scheduler.table)
                if self.auditor.level == "full":
                    self.scheduler.check_plan(plan)
                return plan
            except (BoundViolation, LawViolation) as error:
                self._fail(plan, error.rows or range(plan.num_rows), str(error))

    def _launch(self, plan: StepPlan) -> None:
        self.scheduler.delivered(plan)
        self._in_flight.append(plan)
        if self.trace is not None:
            self.trace.record(plan)
        self.executor.launch(plan)

    def _finish(self, plan: StepPlan) -> None:
        """Collects the oldest step in flight and tells what it brought."""
        try:
            output = self.executor.collect()
            if output.step != plan.step:
                raise ExecutorLost(f"the output of step {output.step} came for step {plan.step}: plan and output no longer go together")
        except StepFailed as error:
            self._fail(plan, range(plan.num_rows), str(error))
            self.scheduler.failed(plan)
        else:
            self._take(plan, output)
        self._in_flight.popleft()
        self.num_steps += 1
        if self.auditor.level == "full":
            self.scheduler.check()

    def _take(self, plan: StepPlan, output: StepOutput) -> None:
        """Commits what the executor gave. Rows that went wrong, and rows whose output is not what the plan asked for, end with an error."""
        errors = {row: what for row, what in output.row_error.items() if 0 <= row < plan.num_rows}
        try:
            self.auditor.check_output(plan, output)
        except LawViolation as error:
            errors.update(dict.fromkeys(error.rows or range(plan.num_rows), str(error)))
        self._fail(plan, errors, errors)
        if len(errors) == plan.num_rows:
            self.scheduler.failed(plan)
            return
        # Where each row's entries begin among those of all rows.
        sampled, scored = np.cumsum(plan.num_samples) - plan.num_samples, np.cumsum(plan.num_scored) - plan.num_scored
        for progress in self.scheduler.commit(plan, output.tokens, frozenset(errors)):
            self._tell(plan, output, progress, sampled, scored)

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

    def _fail(self, plan: StepPlan, rows: Iterable[int], error: str | dict[int, str]) -> None:
        """Ends the sequences behind rows of a plan with an error; their pages are freed, unsealed ones unsealed."""
        found = [(row, sequence) for row in rows for sequence in self.scheduler.sequences_of(plan, [row])]
        self.scheduler.drop([sequence for _, sequence in found])
        for row, sequence in found:
            text = self._live[sequence.request_id].open[sequence.sample].flush()
            self._end(sequence, FinishReason.ERROR, text, error=error if isinstance(error, str) else error[row])

    def _lose(self, error: BaseException) -> None:
        """The executor is gone: every request ends now."""
        self.lost = f"executor {self.executor.name} was lost: {type(error).__name__}: {error}"
        streams = [stream for live in list(self._live.values()) for stream in list(live.open.values())]
        self._in_flight.clear()
        self.scheduler.abandon()
        for stream in streams:
            self._end(stream.sequence, FinishReason.ERROR, stream.flush(), error=self.lost)

    # ---- convenience ---------------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> EventStream:
        """Events of one request until its terminal one. Closing the iterator aborts the request, dropping it lets the next step do so.

        Raises as `add` does, at the call.

        Streams may run side by side, and beside `step` and `generate`: whichever asks first advances all of them.
        """
        request_id = self.add(prompt, params)
        self._inboxes[request_id] = deque()
        return EventStream(request_id, self._wait, self._forget, self._dropped.append)

    def _forget(self, request_id: int) -> None:
        """Nobody waits for the request any more: it ends, and its remaining events go nowhere."""
        self.abort(request_id)
        self._inboxes.pop(request_id, None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool | Callable[[int, int], None] = False,
    ) -> list[GenerateResult]:
        """Runs requests to their ends and returns their results in order.

        One prompt (text, token ids or Request) or a list of them; one SamplingParams for all or one each. `progress` shows a bar of finished
        requests on stderr, or is called with (finished, total). All requests are checked before any is queued.
        """
        many = as_prompts(prompts)
        each: list[SamplingParams | None]
        if params is None or isinstance(params, SamplingParams):
            each = [params] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise RequestRefused("params", Count(len(each), "entry", "entries"), f"one for all or one for each of {len(many)} prompts")
        requests = [self.request(prompt, own) for prompt, own in zip(many, each, strict=True)]
        ids: list[int] = []
        collected: dict[int, list[Event]] = {}
        try:
            for request in requests:
                ids.append(self.add(request))
                self._inboxes[ids[-1]] = deque()
                collected[ids[-1]] = []
            with ProgressBar(progress, len(ids)) as advance:
                for done, request_id in enumerate(ids):
                    while not collected[request_id] or not collected[request_id][-1].terminal:
                        collected[request_id].append(self._wait(request_id))
                    advance(done + 1, len(ids))
        finally:
            for request_id in ids:
                self._forget(request_id)
        return [joined(request_id, request, collected[request_id]) for request_id, request in zip(ids, requests, strict=True)]

    def close(self) -> None:
        """Ends every request as aborted and frees the executor; steps in flight are forgotten. Calling it again does nothing."""
        for request_id in list(self._live):
            self.abort(request_id)
        if self.lost is None:
            self.lost = "the engine was closed"
            self._in_flight.clear()
            self.scheduler.abandon()
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _derived_seed(engine_seed: int, request_id: int) -> int:
    """A request's seed when it names none: splitmix64's finaliser over engine seed and request number, so that neighbours are unrelated."""
    value = (engine_seed + (request_id + 1) * 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
