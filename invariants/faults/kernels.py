"""Faults of Triton kernels and of the lists that they walk."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_CONSTANTS = "**constants(tile, spread, window, q.dtype, num_kv_heads, group, head_dim, page_size, keys.stride()[:3])"
_ATTENTION, _TASKS = "twinfer.kernels.attention.kernel:", "twinfer.kernels.attention.tasks:"
_ROUTER, _EXPERTS = "twinfer.kernels.router.kernel:", "twinfer.kernels.experts.kernel:"


def _fault(name: str, what: str, place: str, old: str, new: str, red: tuple[str, ...], link: str = "") -> Fault:
    return Fault(name, what, "kernel", red, edited(place, old, new), _GITHUB + link if link else "")


FAULTS: tuple[Fault, ...] = (
    _fault("chunk-local query position", "A later chunk's queries see keys as if the chunk began at position 0.",
           _ATTENTION + "attention_kernel", "start = seen - length + begin", "start = begin", ("operations",), "gittensor-ai-lab/sparkinfer/issues/3"),
    _fault("split count by batch", "With more than four rows a context is cut into smaller splits, so bits depend on the batch.",
           _ATTENTION + "attention", _CONSTANTS, f"**({_CONSTANTS[2:]} | ({{}} if spread or len(row_indptr) <= 5 else {{'SPLIT': 128}}))", ("attention bits",),
           "vllm-project/vllm/pull/49827"),
    _fault("mask from the row's end", "Each query of a chunk sees the whole row.",
           _ATTENTION + "walk", "sees = at[None, :] <= pos[:, None]", "sees = at[None, :] < seen", ("operations",)),
    _fault("own key hidden", "A query does not see its own key.",
           _ATTENTION + "walk", "sees = at[None, :] <= pos[:, None]", "sees = (at[None, :] < pos[:, None]) | (at[None, :] == 0)", ("operations",)),
    _fault("zero times NaN", "Values behind a context are weighed with 0, which keeps a NaN that somebody left there.",
           _ATTENTION + "walk", "written = at < seen", "written = at < seen + BN", ("attention bits",)),
    _fault("partials of the launch before", "Only a tile's first split stores its maximum, so the fold reads what another launch left.",
           _ATTENTION + "attention_kernel", "tl.store(PARTIAL_M + mine, m, mask=live)", "tl.store(PARTIAL_M + mine, m, mask=live & (split == oldest))",
           ("used workspace",)),
    _fault("arrivals not set back", "Counters keep the splits of the launch before, so the next one folds too early.",
           _ATTENTION + "attention_kernel", "tl.store(ARRIVED + base * K + h, 0)", "pass", ("used workspace",)),
    _fault("values of the first head", "Each key-value head weighs the first one's values.",
           _ATTENTION + "attention_kernel", "values = VALUES + h.to(tl.int64) * HEAD_STRIDE", "values = VALUES", ("operations",),
           "FlashML-org/FreeToken/pull/177"),
    _fault("window forgotten", "Keys behind the sliding window are seen.",
           _ATTENTION + "walk", "sees = sees & (at[None, :] > pos[:, None] - WINDOW)", "sees = sees & (at[None, :] >= 0)", ("operations",)),
    _fault("splits rounded down", "The keys of the last, partly filled split are in no task.",
           _TASKS + "plan_tasks", "splits = -(-end // SPLIT)", "splits = np.maximum(end // SPLIT, 1)", ("task list", "staging")),
    _fault("partials overlap", "Two tiles of a step keep their partials in one place.",
           _TASKS + "plan_tasks", "np.cumsum(own) - own, 0)", "(np.cumsum(own) - own) // 2, 0)", ("task list",)),
    _fault("tiles by whole rows", "The tokens behind a row's last whole tile are in no task.",
           _TASKS + "_tiles", "number = -(-lengths // tile_tokens)", "number = np.minimum(lengths, np.maximum(lengths // tile_tokens, 1))", ("task list",)),
    _fault("last change dropped", "The last entry of a page table update stays as it was.",
           "twinfer.kernels.page_table.kernel:update_page_table_kernel", "inside = i < n", "inside = i < n - 1", ("operations",)),
    _fault("page ids clipped", "A page beyond the last one that the kernel knows is taken for that one.",
           "twinfer.kernels.rope.kernel:qk_norm_rope_write_kernel", "page = slot // page_size", "page = tl.minimum(slot // page_size, 1)", ("operations",),
           "vllm-project/tpu-inference/pull/2366"),
    _fault("rope by token", "A token is turned by its place in the step, not by its position.",
           "twinfer.kernels.rope.kernel:qk_norm_rope_write_kernel", "tl.load(POSITIONS + t)", "t", ("operations",)),
    _fault("feed one slot off", "A token that only the device has is another slot's.",
           "twinfer.kernels.embedding.kernel:embedding_kernel", "FEED + tl.maximum(-i - 1, 0)", "FEED + tl.maximum(-i - 2, 0)", ("operations",)),
    _fault("silu of the wrong half", "The gate is read where up lies.",
           "twinfer.kernels.swiglu.kernel:swiglu_kernel", "GATE_UP + t * 2 * I + columns",
           "GATE_UP + t * 2 * I + I + columns", ("operations",)),
    _fault("expert ties to the higher number", "Of experts that are equally likely the last one is chosen, and the reference chooses the first.",
           _ROUTER + "route_kernel", "(BLOCK - 1 - i)", "i", ("operations",)),
    _fault("padding is routed", "Padding tokens go through experts and take places in their lists.",
           _ROUTER + "route_kernel", "tl.load(TOKEN_ROW + t) >= 0", "tl.load(TOKEN_ROW + t) >= -1", ("operations",)),
    _fault("experts in descending order", "A token's experts are listed from the last on, so their sum is added in another order.",
           _ROUTER + "route_kernel", "tl.cumsum(chosen.to(tl.int32), axis=0) - 1", "k - tl.cumsum(chosen.to(tl.int32), axis=0)", ("operations",)),
    _fault("next expert's weight", "A tile of pairs is multiplied with the weight behind its expert's.",
           _EXPERTS + "experts_kernel", "expert = tl.load(TILES + tile * 3)", "expert = tl.load(TILES + tile * 3) ^ 1", ("operations",)),
    _fault("output in a neighbour's place", "The output of a pair is stored where the pair before it has its own.",
           _EXPERTS + "experts_kernel", "target = pair.to(tl.int64)", "target = tl.maximum(pair - 1, 0).to(tl.int64)", ("operations",)),
    _fault("expert without a pair counted", "A pair that has no expert adds what its place happens to hold.",
           _EXPERTS + "combine_kernel", "mask=inside & live, other=0.0", "mask=inside, other=0.0", ("operations",)),
)  # fmt: skip
