"""Engine: what a caller holds. It puts loop, scheduler, auditor and executor together, and runs whole requests for who does not want to step.

Both engines are this class with a different Executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.engine.admission import Admission
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.loop import Loop
from twinfer.engine.prompts import Prompt, as_prompts
from twinfer.engine.results import ProgressBar, joined
from twinfer.engine.scheduler import Scheduler
from twinfer.engine.stream import EventStream
from twinfer.engine.tokenizer import Tokenizer
from twinfer.errors import RequestRefused
from twinfer.executor import Executor
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.request import Event, GenerateResult, Request
from twinfer.sampling import SamplingParams


class Engine(Loop):
    """A language model that serves many requests at once.

    executor      what computes
    model, limits shape of the model and what a step may hold
    tokenizer     None: token ids in, token ids out
    defaults      the checkpoint's end tokens and sampling defaults
    seed          from which requests without a seed get theirs
    prefix_cache  False: pages are never shared; nor are they in a model that keeps states and no snapshots of them
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
        scheduler = Scheduler(limits, partial(ledger.host, owner="engine"), prefix_cache=prefix_cache)
        level = audit if audit is not None else "step"
        auditor = Auditor(
            limits, model, level=level, pages=scheduler.page_state, slots=scheduler.slot_state, states=scheduler.states.slots,
            snapshots=scheduler.keeping.pool.columns,
        )  # fmt: skip
        super().__init__(executor, limits, scheduler, auditor, Admission(model, limits, tokenizer, defaults), tokenizer, seed)
        self.model, self.ledger, self.defaults = model, ledger, defaults

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> EventStream:
        """Events of one request until its terminal one. Closing the iterator aborts the request, dropping it lets the next step do so.

        Raises as `add` does, at the call.

        Streams may run side by side, and beside `step` and `generate`: whichever asks first advances all of them.
        """
        request_id = self.add(prompt, params)
        self._inboxes[request_id] = deque()
        return EventStream(request_id, self._wait, self._forget, self._dropped.append)

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
        elif not isinstance(params, list | tuple):
            raise RequestRefused("params", params, "a SamplingParams, or a list of them")
        else:
            each = list(params)
        if len(each) != len(many):
            raise RequestRefused("params", Count(len(each), "entry", "entries"), f"one for all or one for each of {len(many)} prompts")
        requests = [self._nth_request(i, len(many), prompt, own) for i, (prompt, own) in enumerate(zip(many, each, strict=True))]
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

    def _nth_request(self, index: int, count: int, prompt: Prompt, params: SamplingParams | None) -> Request:
        """The checked request of one of `count` prompts; where there are several, a refusal says which it is."""
        try:
            return self.request(prompt, params)
        except RequestRefused as refused:
            if count == 1:
                raise
            raise RequestRefused(f"prompts[{index}]: {refused.field}", refused.value, refused.limit, refused.remedy) from None

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
