"""StepInputs: writes a plan into the staging set of its step and sends it to the device. It decides only how attention is scheduled; launches no model.

What a step reads lies in the arena (one copy); lists that most steps lack or that may be long (bias, seen tokens, masks, page-table changes, targets)
are copied alone, as far as they reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.engine.flatten import FlatTokens, flatten_tokens, pad_tokens
from twinfer.errors import ExecutorLost
from twinfer.fast.buffers import SMALL_INPUTS, TASK_LISTS, Buffers
from twinfer.fast.device import Device
from twinfer.fast.launches import AttentionLaunch, GdnLaunch, Launches
from twinfer.fast.shape import StepShape
from twinfer.kernels.attention.schedule import num_programs, spread, spread_rows
from twinfer.kernels.attention.tasks import count_tasks, max_tasks, plan_tasks
from twinfer.kernels.attention.tiles import Tile, tile_tokens
from twinfer.kernels.gdn.tasks import LISTS, Counts, Lists, max_chunk_tasks, max_long_rows, plan_lists
from twinfer.kernels.page_table.kernel import update_page_table
from twinfer.kernels.sampling.sampler import Columns, Stages
from twinfer.limits import Limits
from twinfer.plan import SAMPLING_DTYPES, SAMPLING_LIST_DTYPES, StepPlan, most_logprobs
from twinfer.table import PageTable

PADDING_ROW = -1  # in sampled_row: no token is drawn there; in token_row: a token of no row; in row_state_slot: a row without a state


class Asked(NamedTuple):
    """Log probabilities that a step gives: kind "sampled" or "scored", of how many positions, with how many alternatives each."""

    kind: str
    num_positions: int
    num_top: int


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A plan as the device has it.

    set           staging set of the step
    flat          its tokens on the host
    shape         tokens to compute, padding included
    num_sampled   positions to sample, without padding; `num_drawn` with it
    launches      what the forward's kernels are launched with
    columns, stages   for sampling
    asked         log probabilities that the step gives
    """

    set: int
    flat: FlatTokens
    shape: StepShape
    num_sampled: int
    num_drawn: int
    launches: Launches
    columns: Columns
    stages: Stages
    asked: tuple[Asked, ...]


class StepInputs:
    """Staging of steps over `buffers`."""

    def __init__(self, config: ModelConfig, limits: Limits, buffers: Buffers, device: Device) -> None:
        self.config, self.limits, self.buffers, self._device = config, limits, buffers, device
        self._table = PageTable(buffers.table_arrays["page_table"], buffers.table_arrays["page_counts"])
        self._group = config.num_heads // config.num_kv_heads
        self._spread_tile = device.attention_tile(True, config.head_dim, self._group)
        self._long_tile = device.attention_tile(False, config.head_dim, self._group)
        self._mixed_tile = device.decode_tile(config.head_dim, self._group, limits.max_batch)  # of short rows beside long ones: one, for graphs too
        self._spread_tokens = tile_tokens(self._spread_tile, self._group)
        self._verify_tokens = 1 + limits.speculative_tokens
        spread_tasks = buffers.staging[0]["spread_tasks"]
        self._max_spread = spread_tasks.shape[0] * spread_tasks.shape[1]
        self._needs_rows = config.gdn is not None or config.experts is not None  # kernels that must know which tokens are padding, or of which row
        self._num_steps = 0

    def graph_launches(self, shape: StepShape) -> Launches:
        """For a captured step: what its rows are is not known, so each launch has programs for as many tasks as there may be."""
        rows = min(self.limits.max_batch, shape.num_tokens)
        if shape.decode:
            gdn = self._gdn_launch(shape.num_tokens, Counts(0, 0, shape.num_tokens, shape.num_tokens))
        else:
            tasks, longs = max_chunk_tasks(shape.num_tokens, rows), max_long_rows(shape.num_tokens, rows)
            gdn = self._gdn_launch(rows, Counts(tasks, longs, rows, rows))
        return Launches(self._graph_attention(shape), gdn)

    def _gdn_launch(self, num_rows: int, counts: Counts) -> GdnLaunch | None:
        gdn = self.config.gdn
        return None if gdn is None else GdnLaunch(num_rows, *counts, *self._device.gdn_tiles(gdn.key_head_dim, gdn.value_head_dim, counts.singles))

    def _graph_attention(self, shape: StepShape) -> tuple[AttentionLaunch, ...]:
        """Attention's launches for a captured step.

        decode: what is spread is known from the number of rows. Else all three lists are walked; one that a step leaves empty costs its programs' start.
        """
        heads, processors, size = self.config.num_kv_heads, self._device.multiprocessors, shape.num_tokens
        spread_launch = AttentionLaunch("spread_tasks", self._spread_tile, num_programs(self._max_spread, heads, processors, True))
        rows = min(self.limits.max_batch, size)
        short = AttentionLaunch("decode_tasks", self._mixed_tile, num_programs(rows * self._verify_tokens, heads, processors, False))
        if shape.decode:
            spreads = size <= spread_rows(size, heads, self.limits.page_size, self._verify_tokens, self._spread_tokens)
            return (spread_launch,) if spreads else (replace(short, tile=self._short_tile(size), num_programs=size),)
        most = max_tasks(rows, size, 0, size, tile_tokens(self._long_tile, self._group), False)
        return (spread_launch, short, AttentionLaunch("serial_tasks", self._long_tile, num_programs(most, heads, processors, False)))

    def _short_tile(self, num_rows: int) -> Tile:
        return self._device.decode_tile(self.config.head_dim, self._group, num_rows)

    def stage(self, plan: StepPlan, shape: StepShape) -> StagedStep:
        """Fills the next staging set from `plan`, padded to `shape`, and sends it."""
        index = self._num_steps % self.buffers.num_sets
        self._num_steps += 1
        host = self.buffers.staging[index]
        try:
            self._table.apply(plan.delta)
            self._send_changes(plan, index)
        except Exception as error:  # the two tables may differ from now on, and no later plan can tell
            raise ExecutorLost(f"step {plan.step}: the page table was not updated: {type(error).__name__}: {error}") from error
        flat = flatten_tokens(plan, self._table, self.limits.page_size, self.buffers.flat[index])
        num_rows = plan.num_rows
        host["row_slot"][:num_rows] = plan.slot
        for name in SAMPLING_DTYPES:
            host[f"row_{name}"][:num_rows] = getattr(plan.sampling, name)
        host["row_scored_logprobs"][:num_rows] = plan.scored_logprobs
        num_sampled = self._stage_samples(plan, flat, host, shape.num_tokens if shape.decode else 0)
        pad_tokens(flat, self.buffers.flat[index], shape.num_tokens)
        gdn = self._stage_rows(plan, flat, host, shape) if self._needs_rows else None
        self._task_counts(host)[:] = 0
        if shape.decode:
            attention = self._graph_attention(shape)
            self._stage_tasks(plan.length, flat.context, attention[0], host)
        else:
            attention = self._stage_mixed(plan, flat, host)
        stages = Stages.of(plan.sampling, plan.mask is not None)
        if stages.adjust:
            for name in ("bias_indptr", "seen_indptr"):
                host[name][: num_rows + 1] = getattr(plan.sampling, name)
        lists = [launch.tasks for launch in attention]
        self.buffers.arena.upload(index, max((name for name in SMALL_INPUTS if name in lists), key=SMALL_INPUTS.index, default=SMALL_INPUTS[-1]))
        mask = self._send_lists(plan, index) if stages.adjust else None
        num_drawn = shape.num_tokens if shape.decode else num_sampled
        return StagedStep(index, flat, shape, num_sampled, num_drawn, Launches(attention, gdn), self.columns(mask), stages, _asked(plan))

    def columns(self, mask: torch.Tensor | None = None) -> Columns:
        """The sampling columns where they lie on the device, the same place for every step."""
        t = self.buffers.tensors
        rows = {name: t[f"row_{name}"] for name in SAMPLING_DTYPES if name not in ("seed", "num_logprobs")}
        lists = {name: t[name] for name in SAMPLING_LIST_DTYPES}
        return Columns(**rows, **lists, seed=t["row_seed"].view(torch.int64), mask=mask)

    def _send_changes(self, plan: StepPlan, index: int) -> None:
        """The page table's changes, behind all launched steps and before this one."""
        count = len(plan.delta.entry_slot)
        if count:
            staging = self.buffers.staging[index]
            staging["delta_slot"][:count] = plan.delta.entry_slot
            staging["delta_index"][:count] = plan.delta.entry_index
            staging["delta_page"][:count] = plan.delta.entry_page
            slots, indices, pages = (self.buffers.upload(index, name, count) for name in ("delta_slot", "delta_index", "delta_page"))
            update_page_table(slots, indices, pages, self.buffers.tensors["device_page_table"])

    def _stage_samples(self, plan: StepPlan, flat: FlatTokens, host: dict[str, NDArray[Any]], padded: int) -> int:
        """Which token each sample follows, whose row it is, and at which position it will stand."""
        counts = plan.num_samples
        rows = np.repeat(np.arange(plan.num_rows, dtype=np.int32), counts)
        back = np.repeat(np.cumsum(counts), counts) - np.arange(len(rows))  # 1 is a row's last token
        num_sampled = len(rows)
        host["sampled_at"][:num_sampled] = flat.row_indptr[1:][rows] - back
        host["sampled_row"][:num_sampled] = rows
        host["sampled_position"][:num_sampled] = flat.context[rows] - back + 1
        host["sampled_row"][num_sampled:padded] = PADDING_ROW
        return num_sampled

    def _stage_rows(self, plan: StepPlan, flat: FlatTokens, host: dict[str, NDArray[Any]], shape: StepShape) -> GdnLaunch | None:
        """Each token's row and each row's state slot; whatever a graph reads beyond them is padding. And the lists of rows with states."""
        num_rows, num_tokens = plan.num_rows, flat.num_tokens
        host["token_row"][:num_tokens] = np.repeat(np.arange(num_rows, dtype=np.int32), plan.length)
        host["token_row"][num_tokens : shape.num_tokens] = PADDING_ROW
        host["row_state_slot"][:num_rows] = plan.state_slot
        host["row_state_slot"][num_rows:] = PADDING_ROW
        if self.config.gdn is None:
            return None
        lists = Lists(*(host[f"gdn_{name}"] for name in LISTS))
        counts = plan_lists(plan.start, plan.length, plan.state_slot, lists)
        host["gdn_counts"].reshape(-1)[:] = counts
        return self._gdn_launch(num_rows, counts)

    def _stage_tasks(self, lengths: NDArray[np.int32], contexts: NDArray[np.int32], launch: AttentionLaunch, host: dict[str, NDArray[Any]]) -> int:
        tasks, is_spread = host[launch.tasks].reshape(-1, 4), launch.tasks == "spread_tasks"
        count = plan_tasks(lengths, contexts, tile_tokens(launch.tile, self._group), is_spread, tasks, self._max_spread)
        self._task_counts(host)[TASK_LISTS.index(launch.tasks)] = count
        return count

    def _stage_mixed(self, plan: StepPlan, flat: FlatTokens, host: dict[str, NDArray[Any]]) -> tuple[AttentionLaunch, ...]:
        """Short rows and long ones are scheduled apart: a long context in one program would outlast everything else."""
        short = plan.length <= self._verify_tokens
        own: dict[str, NDArray[np.bool_]] = {}
        tasks = places = self._max_spread
        for rows, name in ((short, "decode_tasks"), (~short, "serial_tasks")):
            if not rows.any():
                continue
            lengths, contexts = plan.length[rows], flat.context[rows]
            if self._is_spread(lengths, contexts, tasks, places):
                # Both kinds may be spread: one list, in which the second has what the first leaves.
                used_tasks, used_places = count_tasks(lengths, contexts, self._spread_tokens, True)
                tasks, places, name = tasks - used_tasks, places - used_places, "spread_tasks"
            own[name] = own.get(name, False) | rows
        tiles = {"decode_tasks": self._mixed_tile, "serial_tasks": self._long_tile, "spread_tasks": self._spread_tile}
        launches = []
        for name, rows in own.items():
            launch = AttentionLaunch(name, tiles[name], 1)
            count = self._stage_tasks(np.where(rows, plan.length, 0), flat.context, launch, host)
            heads, processors = self.config.num_kv_heads, self._device.multiprocessors
            launches.append(replace(launch, num_programs=num_programs(max(1, count), heads, processors, name == "spread_tasks")))
        return tuple(launches)

    def _is_spread(self, lengths: NDArray[np.int32], contexts: NDArray[np.int32], tasks: int, places: int) -> bool:
        return spread(lengths, contexts, self.config.num_kv_heads, self.limits.page_size, self._verify_tokens, self._spread_tokens, tasks, places)

    @staticmethod
    def _task_counts(host: dict[str, NDArray[Any]]) -> NDArray[np.int32]:
        """One entry a list, 16 bytes apart, so that kernels see each as aligned."""
        counts: NDArray[np.int32] = host["task_counts"].reshape(len(TASK_LISTS), -1)[:, 0]
        return counts

    def _send_lists(self, plan: StepPlan, index: int) -> torch.Tensor | None:
        """Bias, seen tokens and the mask; gives the mask on the device, as signed integers of the same bits."""
        b = self.buffers
        for name in ("bias_ids", "bias_values", "seen_ids", "seen_counts"):
            values = getattr(plan.sampling, name)
            if len(values):
                b.staging[index][name][: len(values)] = values
                b.upload(index, name, len(values))
        if plan.mask is None:
            return None
        b.staging[index]["token_mask"][: plan.num_rows] = plan.mask
        return b.upload(index, "token_mask", plan.num_rows).view(torch.int32)


def _asked(plan: StepPlan) -> tuple[Asked, ...]:
    found = []
    num_top = most_logprobs(plan.sampling.num_logprobs, plan.num_samples)
    if num_top >= 0:
        found.append(Asked("sampled", int(plan.num_samples.sum()), num_top))
    if len(plan.targets):
        found.append(Asked("scored", len(plan.targets), most_logprobs(plan.scored_logprobs, plan.num_scored)))
    return tuple(found)
