"""flatten: one plan and the page table in, the flat arrays that executors read out. Shared by all executors, so layout faults can't differ.

The arrays are written into staging buffers of the ledger and handed out as views of exactly the needed length; a view that would not fit is a
BoundViolation, never a shortened slice. An executor that keeps the page table on its device reads page lists there and takes `flatten_tokens` alone:
at 256 rows of 16k tokens the concatenated list is 1 MB a step that the device knows already.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from twinfer.errors import BoundViolation
from twinfer.invariants.state import PADDING_LAWS, PAGE_VIEW_LAWS, PaddedTokens, PageView, check
from twinfer.plan import StepPlan
from twinfer.table import PageTable

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
_T = TypeVar("_T", np.int32, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class TokenStaging:
    """Host buffers for one step in flight, each from the ledger under the bound of its name.

    token_ids, positions [tokens] int32; write_slots [tokens] int64; row_indptr [rows + 1] int32; context [rows] int32.
    """

    token_ids: I32
    positions: I32
    write_slots: I64
    row_indptr: I32
    context: I32


@dataclass(frozen=True, slots=True, eq=False)
class Staging(TokenStaging):
    """The same with room for the concatenated page list: page_indptr [rows + 1] int32; page_indices [page references] int32."""

    page_indptr: I32
    page_indices: I32


TOKEN_STAGING = tuple(field.name for field in fields(TokenStaging))
STAGING = tuple(field.name for field in fields(Staging))
"""Names of the bounds that an executor's staging buffers come from."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatTokens:
    """A step's tokens as flat arrays (views into a staging set, valid until that set is used again).

    token_ids    [num_tokens] int32; a negative entry is `from_device(slot)`
    positions    [num_tokens] int32, absolute positions for rope
    write_slots  [num_tokens] int64, page * page_size + offset: where each token's key and value go
    row_indptr   [num_rows + 1] int32: tokens of row i are row_indptr[i] .. row_indptr[i + 1]
    context      [num_rows] int32 = start + length: keys that row i's last token sees (before a sliding window)
    start        [num_rows] int32, the plan's own column
    state_slot   [num_rows] int32, the plan's own column: -1 where the model keeps no state
    """

    token_ids: I32
    positions: I32
    write_slots: I64
    row_indptr: I32
    context: I32
    start: I32
    state_slot: I32

    @property
    def num_rows(self) -> int:
        return len(self.context)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class FlatStep(FlatTokens):
    """The same with the page lists in CSR form.

    page_indptr  [num_rows + 1] int32: page list of row i is page_indices[page_indptr[i] : page_indptr[i + 1]]
    page_indices [page references] int32, counted by reference: shared pages appear once for each row
    """

    page_indptr: I32
    page_indices: I32


def flatten(plan: StepPlan, table: PageTable, page_size: int, staging: Staging) -> FlatStep:
    """Flattens `plan` against `table`, which has the plan's delta applied.

    Raises BoundViolation if a staging buffer is too small, LawViolation where a page list is not as long as its row.
    """
    flat = flatten_tokens(plan, table, page_size, staging)
    page_indptr, page_indices = list_pages(plan, flat, table, page_size, staging)
    return FlatStep(flat.token_ids, flat.positions, flat.write_slots, flat.row_indptr, flat.context, flat.start, flat.state_slot, page_indptr, page_indices)


def list_pages(plan: StepPlan, flat: FlatTokens, table: PageTable, page_size: int, staging: Staging) -> tuple[I32, I32]:
    """The concatenated page list of the step's rows: page_indptr and page_indices of `FlatStep`."""
    num_pages = -(-flat.context // page_size)
    page_indptr = _view(staging.page_indptr, plan.num_rows + 1, "page_indptr")
    page_indptr[0] = 0
    np.add.accumulate(num_pages, out=page_indptr[1:])
    check(PAGE_VIEW_LAWS, PageView(page_indptr, flat.context, page_size))
    page_indices = _view(staging.page_indices, int(page_indptr[-1]), "page_indices")
    slots = plan.slot.tolist()
    if np.array_equal(num_pages, table.num_pages[plan.slot]):
        lists = list(map(table.page_lists.__getitem__, slots))
    else:  # a row whose list reaches beyond what this step reads
        lists = [table.page_lists[slot][:count] for slot, count in zip(slots, num_pages.tolist(), strict=True)]
    np.concatenate(lists, out=page_indices)
    return page_indptr, page_indices


def flatten_tokens(plan: StepPlan, table: PageTable, page_size: int, staging: TokenStaging) -> FlatTokens:
    """All but the page lists. Raises BoundViolation if a staging buffer is too small."""
    num_rows, num_tokens, start = plan.num_rows, plan.num_tokens, plan.start
    context = _view(staging.context, num_rows, "context")
    np.add(start, plan.length, out=context)
    row_indptr = _view(staging.row_indptr, num_rows + 1, "row_indptr")
    row_indptr[0] = 0
    np.add.accumulate(plan.length, out=row_indptr[1:])
    token_ids = _view(staging.token_ids, num_tokens, "token_ids")
    token_ids[:] = plan.tokens
    positions = _view(staging.positions, num_tokens, "positions")
    write_slots = _view(staging.write_slots, num_tokens, "write_slots")
    if num_tokens == num_rows:  # one token a row: the cache position of each token is its row's start
        place, owner = start, plan.slot
    else:
        place = np.arange(num_tokens, dtype=np.int32) + np.repeat(start - row_indptr[:-1], plan.length)
        owner = np.repeat(plan.slot, plan.length)
    positions[:] = place if plan.positions is None else plan.positions
    page_of, offset = np.divmod(place, page_size)
    np.multiply(table.pages[owner, page_of], page_size, out=write_slots, dtype=np.int64)
    write_slots += offset
    return FlatTokens(token_ids, positions, write_slots, row_indptr, context, start, plan.state_slot)


def pad_tokens(flat: FlatTokens, staging: TokenStaging, num_tokens: int) -> None:
    """Fills the staging arrays from the step's own tokens up to `num_tokens` with padding: token 0 at position 0, written to the padding page 0.

    Raises BoundViolation if a staging buffer is too small, LawViolation where anything but padding would be written to the padding page.
    """
    for name in ("token_ids", "positions", "write_slots"):
        _view(getattr(staging, name), num_tokens, name)[flat.num_tokens :] = 0
    check(PADDING_LAWS, PaddedTokens(staging.write_slots[:num_tokens], flat.num_tokens))


def _view(buffer: NDArray[_T], size: int, name: str) -> NDArray[_T]:
    if size > len(buffer):
        raise BoundViolation(name, "entries", size, len(buffer), "the plan is larger than the limits that this buffer was made for")
    return buffer[:size]
