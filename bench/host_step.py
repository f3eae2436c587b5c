"""The host's share of a step, ready to be timed: a scheduler with many long requests that all decode. Nothing is computed: sampled tokens are zeros.

The case of the target: 256 rows at 16k contexts with pages of 16 tokens, so that a step refers to 256k pages. Prompts differ from their first page
on, so nothing is shared, and their lengths are staggered over a page, so that every step 1 row in page_size takes a new page, as in a server.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from twinfer.bench.shapes import shape_config
from twinfer.engine.flatten import STAGING, FlatTokens, Staging, flatten_tokens, list_pages
from twinfer.engine.scheduler import Scheduler
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.plan import StepPlan
from twinfer.request import Request
from twinfer.sampling import SamplingParams
from twinfer.table import PageTable

# Of a step, in the engine's order. The page list is what executors read that keep no page table on a device.
PARTS = ("plan", "audit", "flatten", "page_list", "commit")


class HostStep:
    """Everything between two forwards, part by part. Made when all rows decode and the next part is `plan`.

    room  steps that can be run before the requests reach their end
    """

    def __init__(self, batch: int = 256, context: int = 16384, page_size: int = 16, room: int = 2048) -> None:
        self.limits = Limits(
            max_batch=batch,
            max_step_tokens=max(batch, 16 * context),
            max_chunk_tokens=context,
            warmup_tokens=512,
            max_context=context + room,
            max_step_context=batch * (context + room),
            max_logit_tokens=batch,
            page_size=page_size,
            num_pages=batch * -(-(context + room) // page_size),
        )
        model = shape_config("qwen3-8b")
        ledger = Ledger(self.limits, model, "bfloat16")
        self.scheduler = Scheduler(self.limits, partial(ledger.host, owner="engine"))
        self.auditor = Auditor(self.limits, model, level="step", pages=self.scheduler.page_state, slots=self.scheduler.slot_state)
        self.table = PageTable(ledger.host("page_table", owner="reference"), ledger.host("page_counts", owner="reference"))
        self.staging = Staging(**{name: ledger.host(name, owner="reference") for name in STAGING})
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        for i in range(batch):
            prompt = (i,) * (context - i % page_size)
            self.scheduler.add(Request(prompt, params), request_id=i, sample=0, seed=i, end_tokens=frozenset())
        self._current: StepPlan | None = None
        self._next = 0
        decoding = False
        while not decoding:
            self.run("plan")
            decoding = self.current.num_rows == self.current.num_tokens == batch
            self.advance_to("plan")

    @property
    def current(self) -> StepPlan:
        """The plan that was made last."""
        assert self._current is not None, "nothing has been planned"
        return self._current

    def advance_to(self, part: str) -> None:
        """Runs parts until `part` is the next one."""
        while PARTS[self._next] != part:
            self.run(PARTS[self._next])

    def run(self, *parts: str) -> None:
        """Runs the next parts of the step, which must be `parts`."""
        for part in parts:
            if part != PARTS[self._next]:
                raise ValueError(f"{part} is not next, {PARTS[self._next]} is")
            self._next = (self._next + 1) % len(PARTS)
            getattr(self, f"_{part}")()

    def _plan(self) -> None:
        """Chooses rows, reserves pages, builds the columns."""
        self._current = self.scheduler.plan()

    def _audit(self) -> None:
        """Checks the plan against all bounds and laws."""
        self.auditor.audit(self.current, self.scheduler.table)

    def _flatten(self) -> None:
        """What every executor does on the host first: its table takes the delta, then the flat arrays are written."""
        self.scheduler.delivered(self.current)
        self.table.apply(self.current.delta)
        self.flat: FlatTokens = flatten_tokens(self.current, self.table, self.limits.page_size, self.staging)

    def _page_list(self) -> None:
        """The concatenated page list: 256k references, 1 MB."""
        self.page_indptr, self.page_indices = list_pages(self.current, self.flat, self.table, self.limits.page_size, self.staging)

    def _commit(self) -> None:
        """The step is over: positions move, full pages are sealed. Not part of the target, timed all the same."""
        self.scheduler.commit(self.current, np.zeros(int(self.current.num_samples.sum()), np.int32))
