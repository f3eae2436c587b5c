"""Drives the reference model without an engine: a few sequences, pages dealt in random order, steps written out by hand. Test code only."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from twinfer.engine.flatten import FlatStep
from twinfer.reference.cache import KVCache
from twinfer.reference.qwen3 import Observe, Qwen3


@dataclass
class Sequence:
    """What one request has in cache: the number of its tokens and its page list."""

    context: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """A cache of `num_pages` pages, poisoned with NaN so that a slot that was never written can't be read unseen."""

    def __init__(self, model: Qwen3, page_size: int, num_pages: int = 64, seed: int = 0) -> None:
        config = model.config
        shape = (num_pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.model, self.page_size = model, page_size
        self.cache = KVCache(*([torch.full(shape, float("nan"), dtype=model.dtype) for _ in range(config.num_layers)] for _ in range(2)))
        self.free = random.Random(seed).sample(range(num_pages), num_pages)

    def flat(self, rows: Seq[tuple[Sequence, Seq[int]]]) -> FlatStep:
        """The step in which each sequence gets its tokens, dealing pages as needed."""
        positions: list[int] = []
        write_slots: list[int] = []
        row_indptr, page_indptr, page_indices, starts, contexts = [0], [0], [], [], []
        for sequence, tokens in rows:
            start = sequence.context
            sequence.context += len(tokens)
            while len(sequence.pages) * self.page_size < sequence.context:
                sequence.pages.append(self.free.pop())
            places = range(start, sequence.context)
            positions += places
            write_slots += [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in places]
            page_indices += sequence.pages
            row_indptr.append(len(positions))
            page_indptr.append(len(page_indices))
            starts.append(start)
            contexts.append(sequence.context)
        token_ids = [token for _, tokens in rows for token in tokens]
        small = [np.array(column, np.int32) for column in (token_ids, positions, row_indptr, page_indptr, page_indices, contexts, starts)]
        ids, pos, row_ptr, page_ptr, pages, context, start_column = small
        return FlatStep(ids, pos, np.array(write_slots, np.int64), row_ptr, context, start_column, np.full(len(context), -1, np.int32), page_ptr, pages)

    def step(self, rows: Seq[tuple[Sequence, Seq[int]]], observe: Observe | None = None) -> list[torch.Tensor]:
        """Logits of every token, one tensor [len(tokens), vocab_size] a row."""
        with torch.no_grad():
            logits = self.model.logits(self.model.forward(self.flat(rows), self.cache, observe))
        return list(logits.split([len(tokens) for _, tokens in rows]))


def run_alone(model: Qwen3, tokens: Seq[int], pieces: Seq[int], page_size: int = 16) -> torch.Tensor:
    """Logits [len(tokens), vocab_size] of one request whose tokens are computed in pieces of the given lengths."""
    assert sum(pieces) == len(tokens)
    driver, sequence, at, logits = Driver(model, page_size, num_pages=-(-len(tokens) // page_size) + 5), Sequence(), 0, []
    for piece in pieces:
        logits += driver.step([(sequence, tokens[at : at + piece])])
        at += piece
    return torch.cat(logits)
