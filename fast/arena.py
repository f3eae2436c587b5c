"""Arena: many small step inputs in one block, on the host once for each step in flight and on the device once, so that a step is one copy.

Each input has its own bound and its own place in the block; sizes come from the ledger. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinfer.invariants.ledger import Ledger

ALIGNMENT = 256  # bytes: what torch's own allocator gives, on which kernels' wide loads rest


class Arena:
    """device[name] is a tensor, host[i][name] a numpy array of staging set i; both of the bound's shape and dtype."""

    def __init__(self, names: Sequence[str], ledger: Ledger, device: torch.device, num_sets: int) -> None:
        offsets: dict[str, int] = {}
        size = 0
        for name in names:
            offsets[name] = size
            size += -(-ledger.bytes_of(name) // ALIGNMENT) * ALIGNMENT
        self._ends = {name: offsets[name] + ledger.bytes_of(name) for name in names}
        pinned = device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sets = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(num_sets)]
        self.device: dict[str, torch.Tensor] = {}
        self.host: list[dict[str, NDArray[Any]]] = [{} for _ in range(num_sets)]
        for name in names:
            at = offsets[name]

            def on_device(shape: tuple[int, ...], dtype: str, at: int = at) -> torch.Tensor:
                return _view(self._device, at, shape, dtype)

            self.device[name] = ledger.allocate(name, on_device, owner="fast")
            for i, block in enumerate(self._sets):

                def on_host(shape: tuple[int, ...], dtype: str, at: int = at, block: torch.Tensor = block) -> NDArray[Any]:
                    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
                    return block.numpy()[at : at + count].view(dtype).reshape(shape)

                self.host[i][name] = ledger.allocate(name, on_host, owner="fast host", copy=i)

    def upload(self, index: int, last: str) -> None:
        """Copies staging set `index` up to the end of the input `last` to the device, in stream order."""
        end = self._ends[last]
        self._device[:end].copy_(self._sets[index][:end], non_blocking=True)


def _view(block: torch.Tensor, at: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    return block[at : at + count].view(kind).view(shape)
