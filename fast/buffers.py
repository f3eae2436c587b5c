"""Buffers: every tensor that the fast executor keeps, each from the ledger under the bound of its name. It holds; but for the rope table it computes nothing.

Step inputs are staged on the host once for each step in flight and lie on the device once: a step reads them before the next step's copy, which the
stream puts behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.engine.flatten import TOKEN_STAGING, TokenStaging
from twinfer.engine.frequencies import inverse_frequencies
from twinfer.fast.arena import Arena
from twinfer.fast.states import STATE, WORKSPACE
from twinfer.invariants.bounds import SAMPLING_SCRATCH
from twinfer.invariants.ledger import Ledger
from twinfer.kernels.sampling.sampler import Scratch
from twinfer.plan import SAMPLING_DTYPES

# Attention's task lists, in the order of task_counts: long rows, short rows, rows whose splits are spread over programs.
TASK_LISTS = ("serial_tasks", "decode_tasks", "spread_tasks")
ROW_COLUMNS = tuple(f"row_{name}" for name in SAMPLING_DTYPES)
# In this order in the arena: a step copies no more than the task lists that it uses, of which a decode step's are the shortest.
SMALL_INPUTS = ("row_slot", "row_state_slot", "row_scored_logprobs", *ROW_COLUMNS, "task_counts", "sampled_at", "sampled_row", "sampled_position",
                "bias_indptr", "seen_indptr", *TOKEN_STAGING, "token_row", "gdn_counts", "gdn_singles", "gdn_commits", "gdn_longs", "gdn_tasks",
                "decode_tasks", "spread_tasks", "serial_tasks")  # fmt: skip
LARGE_INPUTS = ("bias_ids", "bias_values", "seen_ids", "seen_counts", "token_mask", "delta_slot", "delta_index", "delta_page",
                "scored_at", "scored_row", "scored_targets")  # fmt: skip
OUTPUTS = ("sampled_tokens", "sampled_errors", "sampled_logprob", "sampled_top_ids", "sampled_top_logprobs",
           "scored_logprob", "scored_top_ids", "scored_top_logprobs")  # fmt: skip
ACTIVATIONS = ("residual", "normed", "projected", "qkv", "queries", "attended", "gate_up", "activated", "logit_inputs", "logits")
GDN = ("gdn_projected", "gdn_queries", "gdn_keys", "gdn_values", "gdn_decay", "gdn_strength", "gdn_mixed", *WORKSPACE.values())
STATES = ("conv_histories", "recurrent_states", "conv_snapshots", "recurrent_snapshots", *(f"state_{name}" for name in STATE))
EXPERTS = ("router_logits", "expert_shares", "expert_numbers", "expert_pairs", "expert_tiles", "expert_tile_count", "expert_offsets", "expert_activated",
           "expert_outputs", "shared_output")  # fmt: skip
TOKEN_BUFFERS = (
    "residual", "normed", "projected", "qkv", "queries", "attended", "gate_up", "activated", "gdn_projected", "gdn_queries", "gdn_keys", "gdn_values",
    "gdn_decay", "gdn_strength", "gdn_mixed", "router_logits", "expert_shares", "expert_numbers", "expert_pairs", "expert_tiles", "expert_activated",
    "expert_outputs", "shared_output",
)  # fmt: skip
"""Activations, an entry a token of the largest step."""
ROPE_POSITIONS = 4096  # positions whose angles exist in fp32 at once
PARTIALS = ("partial_values", "partial_largest", "partial_sum", "partial_arrived")


class Buffers:
    """`tensors[name]` on the device; `staging[i]` what the host fills for steps i, i + sets, .."""

    def __init__(self, config: ModelConfig, ledger: Ledger, device: torch.device, num_sets: int) -> None:
        self.device, self.num_sets = device, num_sets
        pinned = device.type == "cuda"

        def on_device(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            kind: torch.dtype = getattr(torch, dtype)
            if kind.is_floating_point:  # so that a place that is read before it is written can't look like a value
                return torch.full(shape, torch.nan, dtype=kind, device=device)
            return torch.zeros(shape, dtype=kind, device=device)

        def cache(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            # In memory a page holds one head after another, so that a head's keys of a page are one block.
            layers, pages, page_size, heads, dim = shape
            return on_device((layers, pages, heads, page_size, dim), dtype).transpose(2, 3)

        def on_host(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            return torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=pinned)

        names: Iterable[str] = (*ACTIVATIONS, *GDN, *STATES, *EXPERTS, *PARTIALS, *OUTPUTS, *LARGE_INPUTS, "device_page_table", "token_feed", "rope_table")
        self.tensors: dict[str, torch.Tensor] = {name: ledger.allocate(name, on_device) for name in names}
        self.tensors |= {name: ledger.allocate(name, cache) for name in ("kv_keys", "kv_values")}
        for name, _ in SAMPLING_SCRATCH.items():
            self.tensors[f"sampling_{name}"] = ledger.allocate(f"sampling_{name}", on_device)
        self.arena = Arena(SMALL_INPUTS, ledger, device, num_sets)
        self.tensors |= self.arena.device
        self.pinned: list[dict[str, torch.Tensor]] = [
            {name: ledger.allocate(name, on_host, owner="fast host", copy=i) for name in (*LARGE_INPUTS, *OUTPUTS)} for i in range(num_sets)
        ]
        self.staging: list[dict[str, NDArray[Any]]] = [
            {**self.arena.host[i], **{name: tensor.numpy() for name, tensor in self.pinned[i].items()}} for i in range(num_sets)
        ]
        self.flat = [TokenStaging(**{name: staging[name] for name in TOKEN_STAGING}) for staging in self.staging]
        self.table_arrays = {name: ledger.host(name, owner="fast") for name in ("page_table", "page_counts")}
        self.scratch = Scratch(**{name: self.tensors[f"sampling_{name}"] for name in SAMPLING_SCRATCH})
        self._fill_rope(config)

    def _fill_rope(self, config: ModelConfig) -> None:
        """cos and sin of every position, in the model's dtype: angles in fp32, rounded last, as transformers does."""
        table = self.tensors["rope_table"]
        frequencies, factor = inverse_frequencies(config.rope, config.rotary_dim, torch.float32)
        frequencies = frequencies.to(self.device)
        for first in range(0, len(table), ROPE_POSITIONS):
            part = table[first : first + ROPE_POSITIONS]
            angles = torch.arange(first, first + len(part), dtype=torch.float32, device=self.device)[:, None] * frequencies
            angles = torch.cat((angles, angles), dim=-1)  # both halves of a head turn by the same angles
            part[:, 0] = (angles.cos() * factor).to(table.dtype)
            part[:, 1] = (angles.sin() * factor).to(table.dtype)

    def upload(self, index: int, name: str, count: int) -> torch.Tensor:
        """Copies the first `count` entries of one large input of staging set `index`; gives them on the device."""
        target = self.tensors[name][:count]
        target.copy_(self.pinned[index][name][:count], non_blocking=True)
        return target

    def download(self, index: int, name: str, count: int) -> None:
        """Copies the first `count` entries of an output into staging set `index`, in stream order."""
        self.pinned[index][name][:count].copy_(self.tensors[name][:count], non_blocking=True)

    def clear(self) -> None:
        """Forgets every tensor."""
        self.tensors.clear()
        self.pinned.clear()
        self.staging.clear()
        self.flat.clear()
        self.__dict__.pop("arena", None)
        self.__dict__.pop("scratch", None)

    def all(self) -> dict[str, Any]:
        """Every buffer by the name of its bound; those of several sets as lists."""
        staged = self.staging[0] if self.staging else {}
        return {**self.tensors, **self.table_arrays, **{name: [self.tensors[name], *(s[name] for s in self.staging)] for name in staged}}

