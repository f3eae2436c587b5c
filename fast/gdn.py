"""A layer of Gated DeltaNet as kernel launches over the executor's buffers: projections, convolution, recurrence in open chunks, gated norm, output.

A step's rows of one token and its longer ones go through kernels of their own, which give the same bits (`twinfer.kernels.gdn`). It allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinfer.config import ModelConfig
from twinfer.fast.launches import GdnLaunch
from twinfer.fast.states import States
from twinfer.fast.weights import GdnWeights
from twinfer.gdn import GatedDeltaNet as Shape
from twinfer.kernels.gated_norm.kernel import gated_rms_norm
from twinfer.kernels.gdn.kernel import gdn_commits, gdn_longs, gdn_singles
from twinfer.kernels.gdn_inputs.kernel import gdn_inputs, write_histories
from twinfer.kernels.matmul.cublas import Products


class Gdn:
    """All such layers: they share their buffers, and each has its own states."""

    def __init__(self, config: ModelConfig, shape: Shape, tensors: Mapping[str, torch.Tensor], states: States, products: Products) -> None:
        self.config, self.shape, self._tensors, self._states, self._linear = config, shape, tensors, states, products.linear

    def mix(self, w: GdnWeights, x: torch.Tensor, out: torch.Tensor, launch: GdnLaunch) -> None:
        """x [T, h] -> out [T, h]; the rows' states and histories are left as they are behind their last tokens. Padding tokens' out means nothing."""
        b, num_tokens, shape = self._tensors, len(x), self.shape
        projected, mixed = b["gdn_projected"][:num_tokens], b["gdn_mixed"][:num_tokens]
        q, k, v, decay, strength = (b[name][:num_tokens] for name in ("gdn_queries", "gdn_keys", "gdn_values", "gdn_decay", "gdn_strength"))
        positions, token_row, slots = b["positions"][:num_tokens], b["token_row"][:num_tokens], b["row_state_slot"][: launch.num_rows]
        histories, state = self._states.histories[w.place], self._states.layers[w.place]
        lists = {name: b[f"gdn_{name}"] for name in ("tasks", "longs", "singles", "commits")}
        counts, workspace = b["gdn_counts"].view(-1), self._states.workspace
        self._linear(x, w.projection, projected)
        gdn_inputs(projected, w.conv, w.a_log, w.dt_bias, histories, positions, token_row, slots, q, k, v, decay, strength)
        write_histories(projected, b["row_indptr"], b["context"], slots, histories)
        if launch.num_longs:
            tasks, longs = lists["tasks"][: launch.num_tasks], lists["longs"][: launch.num_longs]
            gdn_longs(q, k, v, decay, strength, state, workspace, tasks, longs, counts, mixed, launch.long_tile)
        if launch.num_singles:
            singles = lists["singles"][: launch.num_singles]
            gdn_singles(q, k, v, decay, strength, state, workspace, singles, counts, mixed, launch.single_tile)
        if launch.num_commits:
            gdn_commits(state, lists["commits"][: launch.num_commits], counts, launch.commit_tile)
        gate = projected[:, shape.conv_dim : shape.conv_dim + shape.value_dim]
        gated_rms_norm(mixed, gate, w.norm, mixed.flatten(1), self.config.rms_norm_eps)
        self._linear(mixed.flatten(1), w.out, out)
