"""plan_memory: what an engine will take, computed from config.json and the limits alone. It measures nothing and allocates nothing.

Since every buffer has a bound, memory is a sum: weights + bounds + the step's workspace + one named reserve, and what is left of a budget is pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from twinfer.config import ModelConfig
from twinfer.errors import LimitError
from twinfer.invariants.bound import ITEM_SIZE, Bound
from twinfer.invariants.bounds import BUFFERS, BY_NAME, SAMPLING_SCRATCH
from twinfer.invariants.size import format_bytes
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.limits import Limits

PAGES = ("kv_keys", "kv_values", "page_references", "page_sealed")
SNAPSHOTS = ("conv_snapshots", "recurrent_snapshots", "snapshot_length", "snapshot_written", "snapshot_pins")
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("pages", PAGES),
    ("states", ("conv_histories", "recurrent_states", "state_keys", "state_decay_sums", "state_beta", "state_t_high", "state_x_high", "state_r_high",
                "state_t_low", "state_x_low", "state_r_low", "state_anchor_high", "state_owner", "state_length")),
    ("snapshots", SNAPSHOTS),
    ("page tables", ("page_table", "page_counts", "device_page_table", "delta_slot", "delta_index", "delta_page")),
    ("step arrays", ("page_indices", "token_ids", "positions", "write_slots", "row_indptr", "page_indptr", "context")),
    ("activations", ("residual", "normed", "projected", "qkv", "queries", "attended", "gate_up", "activated", "logit_inputs")),
    ("experts", ("router_logits", "expert_shares", "expert_numbers", "expert_pairs", "expert_tiles", "expert_tile_count", "expert_offsets",
                 "expert_activated", "expert_outputs", "shared_output")),
    ("Gated DeltaNet", ("gdn_projected", "gdn_queries", "gdn_keys", "gdn_values", "gdn_decay", "gdn_strength", "gdn_mixed", "gdn_tasks", "gdn_longs",
                        "gdn_singles", "gdn_commits", "gdn_counts", "gdn_sums", "gdn_strengths", "gdn_t_high", "gdn_m_high", "gdn_t_low", "gdn_m_low",
                        "gdn_diagonal", "gdn_weights", "gdn_streamed")),
    ("attention tasks and partials", ("serial_tasks", "decode_tasks", "spread_tasks", "task_counts", "partial_values", "partial_largest", "partial_sum",
                                      "partial_arrived")),
    ("sampling scratch", tuple(f"sampling_{name}" for name in SAMPLING_SCRATCH)),
    ("logits tile", ("logits",)),
    ("rope table", ("rope_table",)),
    ("token masks", ("token_mask",)),
)
OTHER = "sampling and slot columns"

SNAPSHOT_PART = 4  # of a budget that is left for pages and snapshots, one part in so many is snapshots (see `fit_snapshots`)

# Context, modules, graphs, library workspaces and what the allocator rounds up, which no bound counts. Measured on one H200 with all graphs captured and
# after the largest steps (bench/memory.py): 885 MiB for Qwen3-0.6B, 990 for 8B, of which 527 the context.
RUNTIME_RESERVE = {"cpu": 0, "cuda": 5 * 2**28}
# What the reference sampler holds per logit of a tile (noise words, fp64 scores, sorting): 62 bytes of peak memory growth, measured
# with 32 and 64 rows of 151936 logits on a CPU.
SAMPLER_BYTES = 64


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the table: what takes the bytes, how many, and why so many."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The table. `page_bytes` and `snapshot_bytes` are what one more costs; `budget` None means that nothing limits it.

    host_bytes  what the engine keeps on the host beside it: staging, pinned, once for each step in flight, and columns; 0 where host and device are one
    """

    lines: tuple[MemoryLine, ...]
    limits: Limits
    page_bytes: int
    budget: int | None
    host_bytes: int = 0
    snapshot_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def page_tokens(self) -> int:
        """Tokens that all pages hold."""
        return self.limits.num_pages * self.limits.page_size


def plan_memory(
    model: ModelConfig, limits: Limits, dtype: str, budget_bytes: int | None = None, *, backend: str = "reference", device: str = "cpu"
) -> MemoryPlan:
    """The memory table. Raises LimitError when it exceeds `budget_bytes`, with both numbers."""
    env = {**limit_env(limits, model), **model_env(model)}
    size = {bound.name: counted_bytes(bound, env, dtype, backend) for bound in BUFFERS}
    grouped = {name for _, names in GROUPS for name in names}
    lines = [MemoryLine("weights", model.num_parameters * ITEM_SIZE[dtype], f"{model.num_parameters:,} parameters in {dtype}")]
    for group, names in GROUPS:
        held = [name for name in names if size[name]]
        if held:
            lines.append(MemoryLine(group, sum(size[name] for name in held), _note(held)))
    lines.append(MemoryLine(OTHER, sum(bytes_ for name, bytes_ in size.items() if name not in grouped), "by row, by slot and by sampled token"))
    if backend == "reference":
        workspace = reference_workspace(model, limits, dtype)
        lines.append(MemoryLine("step workspace", workspace, "activations, one row's untiled attention scores, one tile's sampling"))
    lines.append(MemoryLine("runtime reserve", RUNTIME_RESERVE.get(device, RUNTIME_RESERVE["cuda"]), f"outside all bounds, on {device}"))
    host = sum(bound.total_bytes(env, dtype, backend) - bound.device_bytes(env, dtype) for bound in BUFFERS) if backend == "fast" else 0
    each = page_bytes(model, limits, dtype, backend), snapshot_bytes(model, limits, dtype, backend)
    plan = MemoryPlan(tuple(lines), limits, each[0], budget_bytes, host, each[1])
    if budget_bytes is not None and plan.total > budget_bytes:
        snapshots = f" with num_snapshots = {limits.num_snapshots}" if limits.num_snapshots else ""
        raise LimitError(
            f"num_pages = {limits.num_pages}{snapshots} needs {format_bytes(plan.total)} in all, the memory is {format_bytes(budget_bytes)}: "
            "lower num_pages or another limit"
        )
    return plan


def counted_bytes(bound: Bound, env: Mapping[str, int], dtype: str, backend: str) -> int:
    """Bytes of a buffer against a budget, which is the device's: what the fast engine keeps on the host (staging, columns) is not in it."""
    return bound.device_bytes(env, dtype) if backend == "fast" else bound.total_bytes(env, dtype, backend)


def page_bytes(model: ModelConfig, limits: Limits, dtype: str, backend: str = "reference") -> int:
    """Bytes that one more page costs: its keys and values in every layer, and for the reference its entry in the pool."""
    env = {**limit_env(limits, model), **model_env(model)}
    more = {**env, "num_pages": limits.num_pages + 1}
    return sum(counted_bytes(BY_NAME[name], more, dtype, backend) - counted_bytes(BY_NAME[name], env, dtype, backend) for name in PAGES)


def snapshot_bytes(model: ModelConfig, limits: Limits, dtype: str, backend: str) -> int:
    """Bytes that one more snapshot costs: a sequence's state in every Gated DeltaNet layer, and for the reference its entries in the pool."""
    env = {**limit_env(limits, model), **model_env(model)}
    more = {**env, "num_snapshots": limits.num_snapshots + 1}
    return sum(counted_bytes(BY_NAME[name], more, dtype, backend) - counted_bytes(BY_NAME[name], env, dtype, backend) for name in SNAPSHOTS)


def most_snapshots(limits: Limits) -> int:
    """Snapshots that can be hit at once: a hit needs pages behind it, so one for each point of the grid that the pages hold."""
    return limits.num_pages * limits.page_size // limits.snapshot_grid


def fit_snapshots(model: ModelConfig, limits: Limits, dtype: str, budget_bytes: int, *, backend: str = "reference", device: str = "cpu") -> int:
    """Snapshots for a model with states, where a budget decides on pages too; neither `limits.num_pages` nor `limits.num_snapshots` is read.

    State slots and the pages of one longest request come first. Of what is left then, snapshots get one part of SNAPSHOT_PART and pages the others: at
    the shape of Qwen3.6-35B-A3B a snapshot in bfloat16 weighs as much as the pages of 3,200 tokens, so that there is one for each 10,000 tokens of pages,
    about one a conversation that is kept, and most stays for the contexts of those who run.
    """
    least = replace(limits, num_pages=limits.pages_per_context, num_snapshots=0)
    spare = budget_bytes - plan_memory(model, least, dtype, backend=backend, device=device).total
    each = snapshot_bytes(model, least, dtype, backend)
    if spare <= 0 or not each:
        return 0
    count = spare // SNAPSHOT_PART // each
    pages = limits.pages_per_context + max(0, spare - count * each) // page_bytes(model, least, dtype, backend)
    return min(count, most_snapshots(replace(limits, num_pages=pages)))


def spare_snapshots(model: ModelConfig, limits: Limits, dtype: str, budget_bytes: int, *, backend: str = "reference", device: str = "cpu") -> int:
    """Snapshots where the number of pages was given: what the budget leaves, as far as pages can be found behind them. `limits.num_snapshots` is not read."""
    least = replace(limits, num_snapshots=0)
    spare = budget_bytes - plan_memory(model, least, dtype, backend=backend, device=device).total
    each = snapshot_bytes(model, least, dtype, backend)
    return 0 if spare <= 0 or not each else min(spare // each, most_snapshots(limits))


def fit_pages(model: ModelConfig, limits: Limits, dtype: str, budget_bytes: int, *, backend: str = "reference", device: str = "cpu") -> int:
    """Pages that a budget leaves beside everything else; `limits.num_pages` is not read. Raises LimitError when not even one is left."""
    one = plan_memory(model, replace(limits, num_pages=1), dtype, backend=backend, device=device)
    if one.total > budget_bytes:
        weights, reserve = one.lines[0].bytes, one.lines[-1].bytes
        alone = weights + reserve + one.page_bytes
        largest = max(one.lines[1:-1], key=lambda line: line.bytes)
        remedy = (
            "no limit helps: weights, reserve and one page are more than that"
            if alone > budget_bytes
            else f"lower max_step_tokens, max_chunk_tokens, max_context or max_batch (the largest part is {largest.name}, {format_bytes(largest.bytes)})"
        )
        raise LimitError(
            f"memory = {format_bytes(budget_bytes)}: too small; weights {format_bytes(weights)}, buffers and workspace for these limits "
            f"{format_bytes(one.total - alone)}, runtime reserve {format_bytes(reserve)} (outside all bounds, on {device}) "
            f"and one page {format_bytes(one.page_bytes)} need {format_bytes(one.total)}; {remedy}"
        )
    return min(1 + (budget_bytes - one.total) // one.page_bytes, 2**31 - 2)


def reference_workspace(model: ModelConfig, limits: Limits, dtype: str) -> int:
    """Bytes that a step of the reference may hold beside weights, cache and states: its model's formula at the limits, and the sampler.

    The formulas are those of `twinfer.reference.qwen3.Qwen3` and `twinfer.reference.hybrid.Hybrid`.
    """
    narrow, wide = ITEM_SIZE[dtype], 8 if dtype == "float64" else 4
    tokens, chunk, context = limits.max_step_tokens, limits.max_chunk_tokens, limits.max_context + limits.look_ahead + limits.speculative_tokens
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    inner, extent = heads * dim, -(-context // limits.page_size) * limits.page_size
    scores = heads * chunk * context * (2 * narrow + 2 * wide) + 3 * chunk * context
    scores += 2 * narrow * dim * (kv_heads * extent + heads * context) + 16 * (chunk + extent)
    sampling = SAMPLER_BYTES * limits.max_logit_tokens * model.vocab_size
    if model.model_type == "qwen3":
        activations = tokens * (narrow * (4 * model.hidden_size + 4 * (heads + kv_heads) * dim + 3 * model.intermediate_size))
        activations += tokens * wide * (3 * max(model.hidden_size, inner) + 4 * dim)
        return activations + scores + sampling
    return _hybrid_activations(model, tokens, narrow, wide, scores) + sampling


def _hybrid_activations(model: ModelConfig, tokens: int, narrow: int, wide: int, scores: int) -> int:
    """Of the layer that holds most, with what every layer holds; `scores` are those of the largest row."""
    heads, kv_heads, dim, hidden = model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size
    parts = [tokens * narrow * 3 * model.intermediate_size]
    if model.num_attention_layers:
        parts.append(tokens * (narrow * (9 * heads + 6 * kv_heads) * dim + wide * 3 * heads * dim) + scores)
    if model.gdn is not None:
        gdn = model.gdn
        values, state = gdn.num_value_heads, gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim
        each = narrow * (5 * gdn.conv_dim + 4 * gdn.value_dim) + wide * values * (5 * gdn.key_head_dim + 4 * gdn.value_head_dim + 4)
        parts.append(tokens * each + 5 * wide * state + narrow * gdn.conv_kernel * gdn.conv_dim)
    if model.experts is not None:
        experts = model.experts
        routed = experts.num_experts * (narrow + 3 * wide + 8) + 40 * experts.num_per_token
        widths = 4 * hidden + 5 * experts.intermediate_size + 3 * (experts.shared_intermediate_size or 0)
        parts.append(tokens * (routed + narrow * widths))
    return tokens * (narrow * (4 * hidden + 2 * model.rotary_dim) + wide * (3 * hidden + 4 * model.rotary_dim)) + max(parts)


def _note(names: Iterable[str]) -> str:
    return "; ".join(f"{name}: {' x '.join(_bracketed(str(axis)) for axis in BY_NAME[name].shape)}" for name in names)


def _bracketed(formula: str) -> str:
    return f"({formula})" if " " in formula else formula
