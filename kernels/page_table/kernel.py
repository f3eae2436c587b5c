"""Update of the page table in Triton: one program copies BLOCK entries to their places. No arithmetic, so nothing to order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit(do_not_specialize=["n", "width"])
def update_page_table_kernel(SLOTS, INDICES, PAGES, TABLE, n, width, BLOCK: tl.constexpr):
    """Grid (ceil(n / BLOCK),). TABLE[SLOTS[i], INDICES[i]] = PAGES[i]; the table may have more than 2^31 entries."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    at = tl.load(SLOTS + i, mask=inside, other=0).to(tl.int64) * width + tl.load(INDICES + i, mask=inside, other=0)
    tl.store(TABLE + at, tl.load(PAGES + i, mask=inside, other=0), mask=inside)


def update_page_table(slots: torch.Tensor, indices: torch.Tensor, pages: torch.Tensor, table: torch.Tensor) -> None:
    """The call of `plain.update_page_table`; all tensors contiguous."""
    update_page_table_kernel[(triton.cdiv(len(slots), BLOCK),)](slots, indices, pages, table, len(slots), table.shape[1], BLOCK=BLOCK, num_warps=4)
