"""Drives the hybrid reference model without an engine: as tests/model/driver.py, with a state slot for each sequence. Test code only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from tests.model.driver import Driver as DenseDriver
from tests.model.driver import Sequence as DenseSequence
from twinfer.reference.cache import KVCache
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.qwen3 import Observe, wide_dtype
from twinfer.reference.state import StateCache

NUM_SLOTS = 8


@dataclass
class Sequence(DenseSequence):
    """What one request has in cache, and the slot of its state."""

    slot: int = 3


class Driver(DenseDriver):
    """Cache and states are poisoned with NaN, so that what was never written can't be read unseen."""

    def __init__(self, model: Hybrid, page_size: int = 16, num_pages: int = 64, seed: int = 0) -> None:
        config, gdn = model.config, model.config.gdn
        places = [config.has_gdn(i) for i in range(config.num_layers)]
        shape = (num_pages + 1, page_size, config.num_kv_heads, config.head_dim)
        self.hybrid, self.page_size = model, page_size
        self.cache = KVCache(*([torch.full(shape, torch.nan, dtype=model.dtype) for _ in range(places.count(False))] for _ in range(2)))
        history = () if gdn is None else (NUM_SLOTS, gdn.conv_kernel - 1, gdn.conv_dim)
        state = () if gdn is None else (NUM_SLOTS, gdn.num_value_heads, gdn.key_head_dim, gdn.value_head_dim)
        self.states = StateCache(
            [torch.full(history, torch.nan, dtype=model.dtype) for _ in range(places.count(True))],
            [torch.full(state, torch.nan, dtype=wide_dtype(model.dtype)) for _ in range(places.count(True))],
        )
        self.free = self.order(num_pages, seed)

    @staticmethod
    def order(num_pages: int, seed: int) -> list[int]:
        """Pages in the order in which they are dealt."""
        return torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def step(self, rows: Seq[tuple[DenseSequence, Seq[int]]], observe: Observe | None = None) -> list[torch.Tensor]:
        """Logits of every token, one tensor [len(tokens), vocab_size] a row."""
        slots = [getattr(sequence, "slot", 0) for sequence, _ in rows]
        with torch.no_grad():
            logits = self.hybrid.logits(self.hybrid.forward(self.flat(rows), self.cache, self.states, slots, observe))
        return list(logits.split([len(tokens) for _, tokens in rows]))


def run_alone(model: Hybrid, tokens: Seq[int], pieces: Seq[int], page_size: int = 16) -> torch.Tensor:
    """Logits [len(tokens), vocab_size] of one request whose tokens are computed in pieces of the given lengths."""
    assert sum(pieces) == len(tokens)
    driver, sequence, at, logits = Driver(model, page_size, num_pages=-(-len(tokens) // page_size) + 5), Sequence(), 0, []
    for piece in pieces:
        logits += driver.step([(sequence, tokens[at : at + piece])])
        at += piece
    return torch.cat(logits)
