"""Loop: one step after the other. Lets the scheduler plan, the auditor check and the executor compute, and contains what fails.

One step: plan -> audit -> launch -> collect -> commit -> events. With look-ahead, up to
`limits.look_ahead` further steps are planned and launched before the oldest is collected.

Every accepted request gets exactly one terminal event, whatever fails:
  (a) a plan that breaks a bound or law is refused before launch; the rows that cause it end with an error, the others are planned again;
  (b) StepFailed: the rows of that step end with an error (and with them their rows in later steps in flight), their pages are freed unsealed,
      nobody else is touched;
  (c) anything else from an executor means that it is lost: every request ends with an error at once and `healthy` is false from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from twinfer.engine.admission import Admission
from twinfer.engine.check import loop_state
from twinfer.engine.live import LiveRequests
from twinfer.engine.scheduler import Scheduler
from twinfer.engine.tokenizer import Tokenizer
from twinfer.engine.trace import Trace
from twinfer.errors import BoundViolation, ExecutorLost, LawViolation, StepFailed
from twinfer.executor import Executor
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.state import FAILURE_LAWS, LOOP_LAWS, STAGING_SETS, FailedStep, check
from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason

# An engine on which nothing succeeds is not healthy, whoever is at fault: so many failed steps in a row are loss. One fault costs one step, since its rows end.
MOST_FAILED_STEPS = 8


class Loop(LiveRequests):
    """Runs the requests' steps on `executor`; `trace` records launched plans where there is one."""

    def __init__(
        self, executor: Executor, limits: Limits, scheduler: Scheduler, auditor: Auditor, admission: Admission, tokenizer: Tokenizer | None, seed: int
    ) -> None:
        super().__init__(scheduler, admission, tokenizer, seed)
        self.executor, self.limits, self.auditor = executor, limits, auditor
        self.trace: Trace | None = None
        self.num_steps = 0
        self._in_flight: deque[StepPlan] = deque()  # launched, not collected, oldest first
        self._num_failed = 0  # steps that failed as a whole since the last one that did not

    @property
    def in_flight(self) -> Sequence[StepPlan]:
        """Launched steps that are not collected, oldest first."""
        return self._in_flight

    @property
    def healthy(self) -> bool:
        """False from the moment the executor was lost."""
        return self.lost is None

    def step(self) -> list[Event]:
        """Runs one step and returns what it brought. Never raises for a request's or the executor's failure: those are events.

        Events of requests that a `stream` or `generate` waits for go there and not here.
        """
        self._advance()
        events, self._events = self._events, []
        return events

    def abort(self, request_id: int) -> bool:
        """As LiveRequests says. Interrupted halfway, a request is neither open nor told of its end: that is loss too."""
        try:
            return super().abort(request_id)
        except BaseException as error:
            self._lose(error)
            raise

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

    def _wait(self, request_id: int) -> Event:
        """The next event of a request with an inbox, stepping until there is one."""
        inbox = self._inboxes[request_id]
        while not inbox:
            if not self.scheduler.has_work:
                raise LawViolation("terminal_events", f"request {request_id} is waited for, but no work is left that could end it")
            self._advance()
        return inbox.popleft()

    def _plan(self) -> StepPlan | None:
        """A plan that passed the auditor. Each refused plan ends at least one sequence, so this comes to an end.

        Raises what refused a second plan in a row for which no row is at fault: then it is no request that is wrong.
        """
        blameless = 0
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
                blameless = 0 if error.rows else blameless + 1
                if blameless > 1:
                    raise
                self._fail(plan, error.rows or range(plan.num_rows), str(error))

    def _launch(self, plan: StepPlan) -> None:
        self.scheduler.delivered(plan)
        self._in_flight.append(plan)
        check((STAGING_SETS,), loop_state(self))
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
            identity, before = self.scheduler.cached()
            self._fail(plan, range(plan.num_rows), str(error))
            self.scheduler.failed(plan)
            identity_after, after = self.scheduler.cached()
            check(FAILURE_LAWS, FailedStep(identity, before, after, identity_after))
            self._num_failed += 1
            if self._num_failed == MOST_FAILED_STEPS:
                raise ExecutorLost(f"{MOST_FAILED_STEPS} steps in a row failed, the last of them: {error}") from error
        else:
            self._num_failed = 0
            self._take(plan, output)
        self._in_flight.popleft()
        self.num_steps += 1
        if self.auditor.level == "full":
            self.scheduler.check()
        check(LOOP_LAWS, loop_state(self))

    def _take(self, plan: StepPlan, output: StepOutput) -> None:
        """Commits what the executor gave. Rows that went wrong, and rows whose output is not what the plan asked for, end with an error."""
        errors = {row: what for row, what in output.row_error.items() if 0 <= row < plan.num_rows}
        try:
            self.auditor.check_output(plan, output)
        except LawViolation as error:
            errors.update(dict.fromkeys(error.rows or range(plan.num_rows), str(error)))
        if errors:
            self.scheduler.distrust(plan, errors)
            self._fail(plan, errors, errors)
        if len(errors) == plan.num_rows:
            self.scheduler.failed(plan)
            return
        # Where each row's entries begin among those of all rows.
        sampled, scored = np.cumsum(plan.num_samples) - plan.num_samples, np.cumsum(plan.num_scored) - plan.num_scored
        for progress in self.scheduler.commit(plan, output.tokens, frozenset(errors)):
            self._tell(plan, output, progress, sampled, scored)

    # ---- failures ----------------------------------------------------------------------------------------------------------

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
