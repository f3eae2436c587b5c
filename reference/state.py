"""Reference. Slow on purpose: what Gated DeltaNet layers carry between steps, by state slot. Which slot is whose is decided elsewhere."""

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
