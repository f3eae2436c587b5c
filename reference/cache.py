"""Reference. Slow on purpose: the paged KV cache as plain indexing. Which page belongs to whom is decided elsewhere; no memory is allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys (already normed and rotated) and values of every token in cache, by page.

    keys, values  one tensor a layer, [num_pages + 1, page_size, num_kv_heads, head_dim], the model's dtype, made by the ledger; page 0 is
                  the padding page, no request's own.
    A slot is page * page_size + offset, the index of one token when the first two dims are seen as one.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    def write(self, layer: int, write_slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Puts k and v, each [num_tokens, num_kv_heads, head_dim], at `write_slots` [num_tokens] int64. IndexError for a slot outside the cache."""
        page_size = self.keys[layer].shape[1]
        pages, offsets = write_slots // page_size, write_slots % page_size  # [num_tokens] each
        self.keys[layer][pages, offsets] = k
        self.values[layer][pages, offsets] = v

    def gather(self, layer: int, pages: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the first `context` tokens of a page list [num_pages_of_row] int64, in order of positions.

        Each [context, num_kv_heads, head_dim]. ValueError if the page list is shorter than the context.
        """
        page_size = self.keys[layer].shape[1]
        if len(pages) * page_size < context:
            raise ValueError(f"a context of {context} tokens needs more than the {len(pages)} pages of {page_size} tokens in its page list")
        k = self.keys[layer][pages].flatten(0, 1)[:context]  # [context, num_kv_heads, head_dim]
        v = self.values[layer][pages].flatten(0, 1)[:context]  # [context, num_kv_heads, head_dim]
        return k, v
