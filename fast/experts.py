"""A choice among experts as kernel launches over the executor's buffers. It allocates nothing, and the host learns nothing of what was chosen.

One product gives the router's logits and that of the shared expert's gate. Padding tokens, which belong to no row, go through no expert: they would
have weights read that nobody needs. Model specification, section 3.5.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinfer.experts import Experts as Shape
from twinfer.fast.mlp import Mlp
from twinfer.fast.weights import ExpertsWeights
from twinfer.kernels.experts.kernel import combine, grouped_down, grouped_gate_up, tiling
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.router.kernel import group, route
from twinfer.kernels.router.plain import max_tiles


class Experts:
    """All such layers: they share their buffers."""

    def __init__(self, shape: Shape, tensors: Mapping[str, torch.Tensor], products: Products, mlp: Mlp) -> None:
        self.shape, self._tensors, self._linear, self._mlp = shape, tensors, products.linear, mlp

    def work(self, w: ExpertsWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, h] -> out [T, h]: 0 for a padding token."""
        b, num_tokens, num_experts, k = self._tensors, len(x), self.shape.num_experts, self.shape.num_per_token
        logits, shares, numbers, outputs = (b[name][:num_tokens] for name in ("router_logits", "expert_shares", "expert_numbers", "expert_outputs"))
        num_pairs = num_tokens * k
        tiles = tiling(x.device, x.dtype, num_pairs, num_experts)
        listed = b["expert_tiles"].view(-1, 3)[: max_tiles(num_pairs, num_experts, tiles.rows)]
        pairs, activated = b["expert_pairs"].view(-1)[:num_pairs], b["expert_activated"].flatten(0, 1)[:num_pairs]
        offsets, count = b["expert_offsets"][0], b["expert_tile_count"]
        self._linear(x, w.router, logits)
        route(logits[:, :num_experts], b["token_row"][:num_tokens], shares, numbers, self.shape.normalise)
        group(numbers, pairs, offsets, listed, count, tiles.rows)
        grouped_gate_up(x, pairs, listed, count, w.gate_up, activated, k, tiles)
        grouped_down(activated, pairs, listed, count, w.down, outputs, tiles)
        if w.shared is None:
            combine(outputs, shares, numbers, out)
            return
        shared = b["shared_output"][:num_tokens]
        self._mlp.work(w.shared, x, shared)
        combine(outputs, shares, numbers, out, shared, logits[:, num_experts])
