"""PlanFacts: the numbers that bounds are checked against, computed from a plan by a few reductions. It judges nothing.

`StepView` computes what facts and laws share once a step. The arrays are int32; a column with a negative entry has a huge largest one, as if it
were unsigned, so that an upper limit refuses it too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfer.invariants.symbols import ATTENTION_SPLIT, STATE_CHUNK
from twinfer.limits import Limits
from twinfer.plan import StepPlan
from twinfer.table import PageTable

I32 = NDArray[np.int32]
_U32 = np.uint32
_largest = np.maximum.reduce
_least = np.minimum.reduce
_sum = np.add.reduce
_NO_PAGES = (0, 2**31)  # the largest and the least page of none, which no limit refuses


class PlanFacts(NamedTuple):
    """What one step asks for; each field is the symbol of that name in `symbols`.

    num_rows, padded_rows   rows, and rows after padding to the bucket
    uniform_rows            padded_rows where every row is at most 1 + speculative_tokens long (it is padded to its bucket), else 0
    num_tokens              tokens of all rows
    largest_length, largest_context   of one row; a context is start + length
    step_context            sum of the contexts
    page_references         sum of ceil(context / page_size): shared pages count once a row
    largest_position        for rope
    largest_slot, largest_page   indices; the pages that the step writes and those that its delta lists
    num_sampled, largest_samples, num_scored   positions
    spread_splits           of attention: ceil(context / 256) over the rows that are at most 1 + speculative_tokens long, if they are few enough to be spread
    logit_tile              positions of the largest tile in which the step samples (its padding rows too) or scores
    bias_entries, largest_bias, seen_entries   entries of the sampling columns
    largest_logprobs        alternatives asked for at one position, sampled or scored
    used_state_slots        largest state slot + 1
    delta_entries, delta_lengths   changes of the page table that travel with the plan
    used_snapshots          largest snapshot of the step's copies + 1
    num_restores, num_saves copies from a snapshot and into one
    state_tasks             in a model with states: chunks, from multiples of 64 on, that rows of more than one token lie in
    """

    num_rows: int
    padded_rows: int
    uniform_rows: int
    num_tokens: int
    largest_length: int
    largest_context: int
    step_context: int
    page_references: int
    largest_position: int
    largest_slot: int
    largest_page: int
    num_sampled: int
    largest_samples: int
    num_scored: int
    spread_splits: int
    logit_tile: int
    bias_entries: int
    largest_bias: int
    seen_entries: int
    largest_logprobs: int
    used_state_slots: int
    delta_entries: int
    delta_lengths: int
    used_snapshots: int
    num_restores: int
    num_saves: int
    state_tasks: int


CONSTANT_COLUMNS = ("slot", "sequence", "length", "num_samples", "num_scored", "state_slot", "scored_logprobs", "sampling")
"""Columns that stay the same objects from step to step while the same requests decode."""


class Setting(NamedTuple):
    """What stays the same from step to step. vocab_size: None where no model is known; spread_rows: how many short rows are spread (`symbols`)."""

    limits: Limits
    vocab_size: int | None
    spread_rows: int


class PageState(NamedTuple):
    """What the pool knows of each page: references [num_pages + 1] int32, sealed [num_pages + 1] bool."""

    references: I32
    sealed: NDArray[np.bool_]


class SlotState(NamedTuple):
    """What the scheduler knows of each batch slot, all [max_batch].

    identity  int64, the sequence that holds the slot; -1 where nobody does
    planned   int32, tokens in cache when every launched step is over
    known     int32, tokens known when every launched step is over
    unread    int32, tokens that launched steps sample and the host has not read
    """

    identity: NDArray[np.int64]
    planned: I32
    known: I32
    unread: I32


class StateSlots(NamedTuple):
    """What the scheduler knows of each state slot, both [num_state_slots].

    owner   int64, the sequence that holds it; -1 where nobody does
    length  int32, tokens behind the state when every launched step is over; 0 of one that was just given to somebody
    """

    owner: NDArray[np.int64]
    length: I32


class SnapshotColumns(NamedTuple):
    """What the scheduler knows of each snapshot, both [num_snapshots].

    length   int32, tokens behind it, or those that will be when a launched or planned step has saved it; -1 of one that nobody holds
    written  bool, whether the step that saves it was launched
    """

    length: I32
    written: NDArray[np.bool_]


def some(mask: NDArray[np.bool_]) -> bool:
    """Whether an entry is True: a search through bytes takes a tenth of a reduction's time at 256 rows."""
    return b"\x01" in mask.tobytes()


def unsigned_max(values: I32) -> int:
    """The largest entry of an int32 array seen as unsigned: above 2^31 if any is negative, 0 for an empty array."""
    return int(_largest(values.view(_U32))) if values.size else 0


def _copies(plan: StepPlan) -> tuple[int, int, int]:
    """The largest snapshot + 1, restores and saves."""
    restores, saves = plan.restores, plan.saves
    if not restores.size and not saves.size:
        return 0, 0, 0  # the usual step
    named = np.concatenate([restores[:, 0], saves[:, 1]])
    return 1 + unsigned_max(named), len(restores), len(saves)


def _largest_tile(limits: Limits, count: int) -> int:
    """Positions of the largest tile among those of `count` positions; a wrong count, as large as 2^32, is not cut into tiles."""
    return max((end - first for first, end in limits.logit_tiles(min(count, limits.max_step_tokens + limits.buckets[-1]))), default=0)


class StepView:
    """A plan with what several facts and laws need of it, computed once.

    context      [num_rows] int32, start + length
    row_pages    [num_rows] int32, ceil(context / page_size)
    decode       every row has one token
    length_sum, least_length, least_start   of the columns; least_page of `written` and of the delta's entries
    scored_none  num_scored is zero everywhere
    slot_index   `slot` as numpy indexes: several times as fast as with int32
    written      pages that the step writes, one entry a (row, page), [>= num_rows] int32; only what the page table's shape holds; written_sorted in order
    page_table_ok  slots and page lists lie inside the table, so that `written` could be read
    facts        PlanFacts
    """

    __slots__ = (
        "context", "decode", "facts", "least_length", "least_page", "least_start", "length_sum", "limits", "page_table_ok", "pages", "plan", "row_pages",
        "scored_none", "slot_index", "slots", "snapshots", "states", "table", "vocab_size", "written", "written_sorted",
    )  # fmt: skip
    facts: PlanFacts
    length_sum: int
    least_length: int
    least_start: int
    scored_none: bool
    slot_index: NDArray[np.intp]

    def __init__(
        self,
        plan: StepPlan,
        table: PageTable,
        setting: Setting,
        alike: StepView | None = None,
        pages: PageState | None = None,
        slots: SlotState | None = None,
        states: StateSlots | None = None,
        snapshots: SnapshotColumns | None = None,
    ) -> None:
        """The columns of `plan` have one entry a row each (the law `columns`, checked before).

        `alike`: the view of an earlier plan that held the same read-only CONSTANT_COLUMNS and scored nothing either; what follows from them alone is
        taken from there.
        """
        limits, self.vocab_size, spread_rows = setting
        self.plan, self.table, self.limits, self.pages, self.slots, self.states, self.snapshots = plan, table, limits, pages, slots, states, snapshots
        page_size = limits.page_size
        self.context = context = plan.start + plan.length
        self.row_pages = row_pages = (context + (page_size - 1)) // page_size
        if alike is None or not len(context):
            step_context, num_pages, largest_context, constant = self._columns()
            self.slot_index = plan.slot.astype(np.intp)
        else:
            largest_context, self.least_start = int(_largest(context.view(_U32))), int(_least(plan.start))
            step_context, num_pages = int(_sum(context, dtype=np.int64)), int(_sum(row_pages, dtype=np.int64))
            self.length_sum, self.least_length, self.scored_none = alike.length_sum, alike.least_length, True
            constant, self.slot_index = alike.facts, alike.slot_index
        num_slots, width = table.pages.shape
        self.decode = constant.largest_length == 1 and len(plan.tokens) == len(context)
        self.page_table_ok = constant.largest_slot < num_slots and 0 < largest_context <= width * page_size and constant.largest_length < 2**31
        self.written = self._written() if self.page_table_ok else context[:0]
        self.written_sorted = ordered = np.sort(self.written)
        delta = plan.delta
        entries = delta.entry_page
        high, low = (int(ordered[-1]), int(ordered[0])) if ordered.size else _NO_PAGES
        high_entry, low_entry = (int(_largest(entries)), int(_least(entries))) if entries.size else _NO_PAGES
        self.least_page = min(low, low_entry)
        largest_page = max(high, high_entry) if self.least_page >= 0 else self.least_page + 2**32
        largest_position = max(largest_context - 1, 0) if plan.positions is None else unsigned_max(plan.positions)
        self.facts = PlanFacts(
            constant.num_rows, constant.padded_rows, constant.uniform_rows, len(plan.tokens), constant.largest_length, largest_context, step_context,
            num_pages, largest_position, constant.largest_slot, largest_page, constant.num_sampled, constant.largest_samples, len(plan.targets),
            self._spread_splits(constant, spread_rows), max(constant.logit_tile, _largest_tile(limits, len(plan.targets))),
            constant.bias_entries, constant.largest_bias, constant.seen_entries, constant.largest_logprobs, constant.used_state_slots, len(entries),
            len(delta.length_slot), *_copies(plan), self._state_tasks(constant),
        )  # fmt: skip

    def _columns(self) -> tuple[int, int, int, PlanFacts]:
        """Sums of contexts and of their pages, the largest context, and facts of which only those that follow from CONSTANT_COLUMNS are meant."""
        plan, limits, length = self.plan, self.limits, self.plan.length
        num_rows, sampling = len(plan.slot), plan.sampling
        # One reduction over stacked columns costs as much as two or three over one: numpy's price is the call, at 256 rows.
        columns = (self.context, self.row_pages, plan.num_samples, length)
        signed = (plan.state_slot, sampling.num_logprobs)
        if num_rows:
            stack = np.array((*columns, plan.slot, plan.start, plan.num_scored, *signed))
            most: list[int] = _largest(stack, axis=1).tolist()
            least: list[int] = _least(stack, axis=1).tolist()
            sums: list[int] = _sum(stack[: len(columns)], axis=1, dtype=np.int64).tolist()
        else:
            most, least, sums = [0] * 7 + [-1] * 2, [0] * 9, [0] * 4
        if min(least[:5]) < 0:
            most[:5] = [high if low >= 0 else low + 2**32 for high, low in zip(most[:5], least[:5], strict=True)]
        largest_context, _, largest_samples, largest_length, largest_slot = most[:5]
        self.length_sum, self.least_length, self.least_start = sums[3], least[3], least[5]
        self.scored_none = most[6] == least[6] == 0
        padded = limits.bucket(num_rows) if num_rows <= limits.buckets[-1] else num_rows
        # Only rows that score something ask for their scored_logprobs, else a row would be at fault for what another one scores.
        uniform = largest_length <= 1 + limits.speculative_tokens
        scored = plan.scored_logprobs[plan.num_scored > 0] if plan.targets.size else plan.scored_logprobs[:0]
        bias = sampling.bias_indptr
        constant = PlanFacts(
            num_rows, padded, padded if uniform else 0, 0, largest_length, 0, 0, 0, 0, largest_slot, 0, sums[2],
            largest_samples, 0, 0, _largest_tile(limits, sums[2] + (padded - num_rows if uniform else 0)), len(sampling.bias_ids),
            unsigned_max(bias[1:] - bias[:-1]) if sampling.bias_ids.size else 0, len(sampling.seen_ids),
            int(_largest(scored, initial=max(most[8], 0))), 1 + most[7], 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        return sums[0], sums[1], largest_context, constant

    def _spread_splits(self, constant: PlanFacts, spread_rows: int) -> int:
        context = self.context
        if not constant.uniform_rows:
            context = context[self.plan.length <= 1 + self.limits.speculative_tokens]
        if len(context) > spread_rows:
            return 0
        return int(_sum((context + (ATTENTION_SPLIT - 1)) // ATTENTION_SPLIT, dtype=np.int32))  # wraps only beyond what the contract's bounds refuse first

    def _state_tasks(self, constant: PlanFacts) -> int:
        if constant.largest_length <= 1 or constant.used_state_slots <= 0:
            return 0
        long = self.plan.length > 1
        first, last = self.plan.start[long] // STATE_CHUNK, (self.context[long] - 1) // STATE_CHUNK
        return int(_sum(last - first + 1, dtype=np.int64))

    def _written(self) -> I32:
        plan, page_size = self.plan, self.limits.page_size
        if self.decode:
            written: I32 = self.table.pages[self.slot_index, self.row_pages - 1]
            return written
        first = plan.start // page_size
        counts = np.maximum(self.row_pages - first, 0)
        ends = np.cumsum(counts)
        index = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        touched: I32 = self.table.pages[np.repeat(plan.slot, counts), np.clip(index, 0, self.table.pages.shape[1] - 1)]
        return touched
