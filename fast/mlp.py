"""A dense feed forward as kernel launches over the executor's buffers: two products and the gated activation between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinfer.fast.weights import MlpWeights
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.swiglu.kernel import swiglu


class Mlp:
    """All of a model: they share their buffers, which are as wide as the widest."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], products: Products) -> None:
        self._tensors, self._linear = tensors, products.linear

    def work(self, w: MlpWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, h] -> out [T, h]."""
        num_tokens, width = len(x), w.down.shape[1]
        gate_up, activated = (packed(self._tensors[name], num_tokens, n) for name, n in (("gate_up", 2 * width), ("activated", width)))
        self._linear(x, w.gate_up, gate_up)
        swiglu(gate_up, activated)
        self._linear(activated, w.down, out)


def packed(buffer: torch.Tensor, num_tokens: int, width: int) -> torch.Tensor:
    """The beginning of a buffer [tokens, ..] seen as [num_tokens, width], tokens side by side; its own are at least as wide."""
    return buffer.view(-1)[: num_tokens * width].view(num_tokens, width)
