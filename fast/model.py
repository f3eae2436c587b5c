"""The forward of dense Qwen3 as a sequence of kernel launches over the executor's buffers. It allocates nothing and reads nothing back.

Every launch depends on the number of tokens and on `AttentionLaunch` alone, so that the sequence can be captured as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinfer.config import ModelConfig
from twinfer.errors import BoundViolation
from twinfer.fast.buffers import TASK_LISTS, Buffers
from twinfer.fast.weights import Weights
from twinfer.kernels.attention.kernel import attention
from twinfer.kernels.attention.tiles import Tile
from twinfer.kernels.embedding.kernel import embedding
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.norm.kernel import add_rms_norm, rms_norm
from twinfer.kernels.rope.kernel import qk_norm_rope_write
from twinfer.kernels.swiglu.kernel import swiglu


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One launch of attention over the task list of that name (buffers.TASK_LISTS); `num_programs` of each kv head walk it."""

    tasks: str
    tile: Tile
    num_programs: int


class Model:
    """Weights and buffers of one model, and the order in which kernels run over them."""

    def __init__(self, config: ModelConfig, weights: Weights, buffers: Buffers, products: Products) -> None:
        self.config, self.weights, self._linear = config, weights, products.linear
        self._tensors = buffers.tensors

    def forward(self, num_tokens: int, launches: tuple[AttentionLaunch, ...]) -> torch.Tensor:
        """Computes `num_tokens` tokens from the step inputs and writes their keys and values. Returns the hidden vectors [num_tokens, h], normed."""
        b, w, eps = self._tensors, self.weights, self.config.rms_norm_eps
        _within("residual", num_tokens, len(b["residual"]))
        residual, normed, projected, qkv, queries, attended, gate_up, activated = (
            b[name][:num_tokens] for name in ("residual", "normed", "projected", "qkv", "queries", "attended", "gate_up", "activated")
        )
        positions, write_slots = b["positions"][:num_tokens], b["write_slots"][:num_tokens]
        embedding(b["token_ids"][:num_tokens], b["token_feed"], w.embedding, residual)
        rms_norm(residual, w.layers[0].input_norm, normed, eps)
        for i, layer in enumerate(w.layers):
            keys, values = b["kv_keys"][i], b["kv_values"][i]
            self._linear(normed, layer.qkv, qkv.flatten(1), layer.qkv_bias)
            qk_norm_rope_write(qkv.flatten(1), layer.q_norm, layer.k_norm, positions, write_slots, b["rope_table"], queries, keys, values, eps)
            for launch in launches:
                self._attend(launch, i, queries, keys, values, attended)
            self._linear(attended.flatten(1), layer.o, projected, layer.o_bias)
            add_rms_norm(projected, residual, layer.post_norm, normed, eps)
            self._linear(normed, layer.gate_up, gate_up.flatten(1))
            swiglu(gate_up.flatten(1), activated)
            self._linear(activated, layer.down, projected)
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            add_rms_norm(projected, residual, following, normed, eps)
        return normed

    def clear(self) -> None:
        """Forgets the weights: nothing can be computed any more. It asks nothing of the device, which may be lost."""
        empty = torch.empty(0)
        self.weights = Weights(empty, empty, empty, ())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h], at most max_logit_tokens rows -> [n, V] in the buffer of logits, valid until the next call."""
        _within("logits", len(hidden), len(self._tensors["logits"]))
        out = self._tensors["logits"][: len(hidden)]
        self._linear(hidden, self.weights.head, out)
        return out

    def _attend(self, launch: AttentionLaunch, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        b = self._tensors
        tasks, count = b[launch.tasks], TASK_LISTS.index(launch.tasks)
        attention(
            q,
            keys,
            values,
            b["device_page_table"],
            b["row_slot"],
            b["row_indptr"],
            b["context"],
            tasks.view(-1, 4),
            b["task_counts"].view(len(TASK_LISTS), -1)[count],
            b["partial_values"].flatten(0, 1),
            b["partial_largest"].flatten(0, 1),
            b["partial_sum"].flatten(0, 1),
            b["partial_arrived"].flatten(0, 1),
            out,
            scale=self.config.head_dim**-0.5,
            window=self.config.windows[layer] or 0,
            spread=launch.tasks == "spread_tasks",
            tile=launch.tile,
            num_programs=launch.num_programs,
        )


def _within(bound: str, demand: int, capacity: int) -> None:
    """A slice beyond a buffer's end would be shorter, not fail."""
    if demand > capacity:
        raise BoundViolation(bound, "tokens", demand, capacity, "the step is larger than the limits that this buffer was made for")
