"""Update of the page table in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def update_page_table(slots: torch.Tensor, indices: torch.Tensor, pages: torch.Tensor, table: torch.Tensor) -> None:
    """table[slots[i], indices[i]] = pages[i]; places are distinct.

    slots, indices, pages  [n] int32
    table                  [max_batch, pages_per_context] int32
    """
    table[slots.long(), indices.long()] = pages
