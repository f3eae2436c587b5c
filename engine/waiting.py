"""WaitingLine: sequences that wait for a slot, and their admission. First come, first served.

A waiting sequence is admitted when the physical pages for all its known tokens are there beside what running prefills still need (hits in the prefix
cache are credited). A further sample of a request steps aside while the first one still computes prompt pages that it will share.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.admission import max_new_tokens
from twinfer.engine.choice import RowChoice
from twinfer.engine.sequence import Sequence
from twinfer.engine.slots import I32
from twinfer.limits import Limits, ceil_div
from twinfer.plan import PLAIN_FORMAT
from twinfer.request import Request


class WaitingLine(RowChoice):
    """The line in front of the slots. A preempted sequence stands first in it."""

    def __init__(self, limits: Limits, make: Callable[[str], NDArray[Any]], prefix_cache: bool = True) -> None:
        super().__init__(limits, make, prefix_cache)
        self._waiting: deque[Sequence] = deque()
        self._next_id = 0
        self.num_preemptions = 0

    def add(
        self, request: Request, request_id: int, sample: int, seed: int, end_tokens: frozenset[int], leader: Sequence | None = None
    ) -> Sequence:
        """Queues one sample of a request; `leader` is the request's first sample, for the others. Raises RequestRefused when it can never fit."""
        params = request.sampling
        sequence = Sequence(
            id=self._next_id,
            request_id=request_id,
            sample=sample,
            params=params,
            seed=seed,
            num_prompt=len(request.prompt),
            max_new=max_new_tokens(request, self.limits),
            end_tokens=end_tokens,
            root=self.prefix.root(request.cache_salt, PLAIN_FORMAT),
            use_cache=self.prefix_cache and params.prompt_logprobs is None,
            tokens=array("i", request.prompt),
            leader=leader,
            keeps_seen=params.has_penalties,
            seen=dict.fromkeys(request.prompt, 0) if params.has_penalties else {},
        )
        self._next_id += 1
        self._waiting.append(sequence)
        return sequence

    def _admit(self, slots: I32, start: I32, lengths: I32) -> tuple[I32, I32, I32]:
        """Adds rows for waiting sequences, first come first served, while slots, tokens, contexts, pages and state slots last.

        A sequence that awaits its leader is stepped over; one that lacks pages is not, else it would be overtaken for ever.
        """
        limits, size = self.limits, self.limits.page_size
        tokens_left = limits.max_step_tokens - int(lengths.sum())
        context_left = limits.max_step_context - int((start + lengths).sum(dtype=np.int64))
        running = self._order.slots
        owed = int((-(-self._known[running] // size) - self.table.num_pages[running]).clip(0).sum())  # pages that running prefills still need
        new_slots, new_lengths = [], []
        at = 0
        while at < len(self._waiting) and self._free_slots and self.states.available and tokens_left > 0:
            sequence = self._waiting[at]
            if self._awaits_leader(sequence):
                at += 1
                continue
            known = len(sequence.tokens)
            hit = self._match(sequence)
            cached = len(hit.pages) * size
            end = hit.points[0] if hit.points else known
            length = min(end - cached, limits.max_chunk_tokens, tokens_left, context_left - cached)
            unreferenced = sum(1 for page in hit.pages if self.pool.references[page] == 0)
            total = ceil_div(known, size) - len(hit.pages)
            if length < 1 or total + unreferenced + owed > self.pool.num_available:
                break
            del self._waiting[at]
            slot = self._enter(sequence, hit)
            now = ceil_div(cached + length, size) - len(hit.pages)
            self._writer.append(slot, self.pool.allocate(now))
            owed += total - now
            tokens_left -= length
            context_left -= cached + length
            new_slots.append(slot)
            new_lengths.append(length)
        if not new_slots:
            return slots, start, lengths
        self._refresh()
        new = np.array(new_slots, np.int32)
        lengths = np.concatenate([lengths, np.array(new_lengths, np.int32)])
        return np.concatenate([slots, new]), np.concatenate([start, self._planned[new]]), lengths

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Whether the first sample of the same request is still computing prompt pages that this one will share."""
        leader = sequence.leader
        if leader is None or leader.slot < 0 or not (sequence.use_cache and leader.use_cache):
            return False
        return int(self._computed[leader.slot]) < (sequence.num_prompt - 1) // self.hit_grid * self.hit_grid

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._refresh()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting(self) -> tuple[Sequence, ...]:
        """Waiting sequences, next first."""
        return tuple(self._waiting)
