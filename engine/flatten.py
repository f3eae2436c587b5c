"""flatten: one plan and the page table in, the flat arrays that executors read out. Shared by all executors, so layout faults can't differ.

The arrays are written into staging buffers of the ledger and handed out as views of exactly the needed length; a view that would not fit is a
BoundViolation, never a shortened slice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import BoundViolation
from twinfer.plan import StepPlan
from twinfer.table import PageTable

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_T = TypeVar("_T", np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Host buffers for one step in flight, each from the ledger under the bound of its name.

    token_ids, positions [tokens] int32; write_slots [tokens] int64; row_indptr, page_indptr [rows + 1] int32; page_indices [page references] int32.
    """

    token_ids: I32
    positions: I32
    write_slots: I64
    row_indptr: I32
    page_indptr: I32
    page_indices: I32


STAGING = tuple(field.name for field in fields(Staging))
"""Names of the bounds that an executor's staging buffers come from."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatStep:
    """The step as flat arrays (views into a Staging, valid until that staging set is used again).

    token_ids    [num_tokens] int32
    positions    [num_tokens] int32, absolute positions for rope
    write_slots  [num_tokens] int64, page * page_size + offset: where each token's key and value go
    row_indptr   [num_rows + 1] int32: tokens of row i are row_indptr[i] .. row_indptr[i + 1]
    page_indptr  [num_rows + 1] int32: page list of row i is page_indices[page_indptr[i] : page_indptr[i + 1]]
    page_indices [page references] int32, counted by reference: shared pages appear once for each row
    context      [num_rows] int32 = start + length: keys that row i's last token sees (before a sliding window)
    start        [num_rows] int32
    """

    token_ids: I32
    positions: I32
    write_slots: I64
    row_indptr: I32
    page_indptr: I32
    page_indices: I32
    context: I32
    start: I32

    @property
    def num_rows(self) -> int:
        return len(self.context)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _view(buffer: NDArray[_T], size: int, name: str) -> NDArray[_T]:
    if size > len(buffer):
        raise BoundViolation(name, "entries", size, len(buffer), "the plan is larger than the limits that this buffer was made for")
    return buffer[:size]


def flatten(plan: StepPlan, table: PageTable, page_size: int, staging: Staging) -> FlatStep:
    """Flattens `plan` against `table`, which has the plan's delta applied. Raises BoundViolation if a staging buffer is too small."""
    num_rows, num_tokens = plan.num_rows, plan.num_tokens
    context = plan.start + plan.length
    num_pages = -(-context // page_size)

    row_indptr = _view(staging.row_indptr, num_rows + 1, "row_indptr")
    row_indptr[0] = 0
    np.add.accumulate(plan.length, out=row_indptr[1:])
    page_indptr = _view(staging.page_indptr, num_rows + 1, "page_indptr")
    page_indptr[0] = 0
    np.add.accumulate(num_pages, out=page_indptr[1:])

    page_indices = _view(staging.page_indices, int(page_indptr[-1]), "page_indices")
    slots = plan.slot.tolist()
    if np.array_equal(num_pages, table.num_pages[plan.slot]):
        lists = list(map(table.page_lists.__getitem__, slots))
    else:  # a row whose list reaches beyond what this step reads
        lists = [table.page_lists[slot][:count] for slot, count in zip(slots, num_pages.tolist(), strict=True)]
    np.concatenate(lists, out=page_indices)
    pages = table.pages

    token_ids = _view(staging.token_ids, num_tokens, "token_ids")
    token_ids[:] = plan.tokens
    positions = _view(staging.positions, num_tokens, "positions")
    write_slots = _view(staging.write_slots, num_tokens, "write_slots")
    if num_tokens == num_rows:  # one token a row: the cache position of each token is its row's start
        place, owner = plan.start, plan.slot
    else:
        place = np.arange(num_tokens, dtype=np.int32) + np.repeat(plan.start - row_indptr[:-1], plan.length)
        owner = np.repeat(plan.slot, plan.length)
    positions[:] = place if plan.positions is None else plan.positions
    page_of, offset = np.divmod(place, page_size)
    np.multiply(pages[owner, page_of], page_size, out=write_slots, dtype=np.int64)
    write_slots += offset
    return FlatStep(token_ids, positions, write_slots, row_indptr, page_indptr, page_indices, context, plan.start)
