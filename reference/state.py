"""Reference. Slow on purpose: what Gated DeltaNet layers carry between steps, by state slot, and snapshots of it. Which is whose is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """The state of every sequence, one tensor a Gated DeltaNet layer (counted among such layers alone).

    history    [num_slots, K - 1, C], the model's dtype: the convolution's last inputs (`gdn.causal_conv`)
    recurrent  [num_slots, nv, dk, dv], float32, or float64 in a float64 model (`gdn.recurrence`)
    """

    history: Sequence[torch.Tensor]
    recurrent: Sequence[torch.Tensor]

    def read(self, layer: int, slot: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """History and state of a sequence that has `start` tokens behind it. Zeros for none: what another sequence left in the slot is not read."""
        history, recurrent = self.history[layer][slot], self.recurrent[layer][slot]
        return (history, recurrent) if start else (torch.zeros_like(history), torch.zeros_like(recurrent))

    def write(self, layer: int, slot: int, history: torch.Tensor, recurrent: torch.Tensor) -> None:
        """Puts both into the slot."""
        self.history[layer][slot] = history
        self.recurrent[layer][slot] = recurrent


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotCache:
    """Copies of states, each taken when its sequence had a multiple of `Limits.snapshot_grid` tokens behind it.

    states                        whose slots they are copied from and into
    history [layers, num_snapshots, K - 1, C], recurrent [layers, num_snapshots, nv, dk, dv], of the same dtypes
    """

    states: StateCache
    history: torch.Tensor
    recurrent: torch.Tensor

    def restore(self, snapshot: int, slot: int) -> None:
        """Puts a snapshot into a state slot, in every layer, the convolution's history with it."""
        for layer, (history, recurrent) in enumerate(zip(self.history, self.recurrent, strict=True)):
            self.states.write(layer, slot, history[snapshot], recurrent[snapshot])

    def save(self, slot: int, snapshot: int) -> None:
        """Puts a state slot into a snapshot, in every layer, the convolution's history with it."""
        for layer, (history, recurrent) in enumerate(zip(self.states.history, self.states.recurrent, strict=True)):
            self.history[layer, snapshot] = history[slot]
            self.recurrent[layer, snapshot] = recurrent[slot]
