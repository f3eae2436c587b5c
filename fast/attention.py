"""A layer of attention as a sequence of kernel launches over the executor's buffers: projections, cache write, attention, output. It allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinfer.config import ModelConfig
from twinfer.fast.buffers import TASK_LISTS
from twinfer.fast.launches import AttentionLaunch
from twinfer.fast.weights import AttentionWeights
from twinfer.kernels.attention.kernel import attention
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.output_gate.kernel import output_gate
from twinfer.kernels.rope.kernel import qk_norm_rope_write


class Attention:
    """All such layers: they share their buffers."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], products: Products) -> None:
        self.config, self._tensors, self._linear = config, tensors, products.linear

    def mix(self, w: AttentionWeights, x: torch.Tensor, out: torch.Tensor, launches: tuple[AttentionLaunch, ...]) -> None:
        """x [T, h] -> out [T, h]; keys and values of the T tokens are written into the cache."""
        b, num_tokens, config = self._tensors, len(x), self.config
        qkv, queries, attended = (b[name][:num_tokens] for name in ("qkv", "queries", "attended"))
        positions, write_slots, keys, values = b["positions"][:num_tokens], b["write_slots"][:num_tokens], b["kv_keys"][w.place], b["kv_values"][w.place]
        qkv = qkv.flatten(1)
        self._linear(x, w.qkv, qkv, w.qkv_bias)
        qk_norm_rope_write(
            qkv, w.q_norm, w.k_norm, positions, write_slots, b["rope_table"], queries, keys, values, config.rms_norm_eps, config.centred_norms
        )
        for launch in launches:
            self._attend(launch, w.window, queries, keys, values, attended)
        if config.attention_gate:
            output_gate(qkv, attended)
        self._linear(attended.flatten(1), w.o, out, w.o_bias)

    def _attend(
        self, launch: AttentionLaunch, window: int | None, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
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
            window=window or 0,
            spread=launch.tasks == "spread_tasks",
            tile=launch.tile,
            num_programs=launch.num_programs,
        )
