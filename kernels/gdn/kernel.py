"""Gated DeltaNet in the open-chunk form: the arithmetic, and the launches of one layer. The kernels are in chunks.py and singles.py.

One value head; a chunk of 64 rows from a multiple of 64 on; S [dk, dv] the state at its start, in fp32; b = i // 16 the block of row i:
    G_i   = G_(i-1) + g_i                              one fp32 add a token
    R_i   = beta_i (v_i - exp(G_i) (S^T k_i))
    A_ij  = (beta_i (k_i.k_j)) exp(G_i - G_j), j < i;  P_ij = (q_i.k_j) exp(G_i - G_j), j <= i
    T_i   = row i of (I + A)^-1: in its block e_i - sum A_ij T_j; left of it x_i = sum_(j < 16 b) A_ij T_j, T_i = -x_i - sum_(block, j < i) T_ij x_j
    w_i   = P_ii T_i + sum_(j < i) P_ij T_j
    out_i = exp(G_i) (S^T q_i) + (P_ii R_i + sum_(j < i) w_ij R_j)
    S'    = exp(G_63) S + K^T (exp(G_63 - G) (T R))    once the chunk is full
Row i rests on rows before it and on nothing else of the step, and once written does not change: a decode step adds one row by the arithmetic in which
prefill computes 64. So bits do not depend on chunking, batch mates or tiles. It is the recurrence of Yang, Kautz, Hatamizadeh, "Gated Delta Networks"
(arXiv 2412.06464), in the chunk form of its section 3, with the solve applied to R instead of to v and k apart.

What keeps the bits (found on an H200, bench/probes/gdn.py checks it):
    1. Every sum over j or dk is a tl.dot over ascending index in groups of 16 with an fp32 accumulator. Zero operands add nothing, so masked rows, padded
       columns and short chunks cost no bits. tl.sum only where a single term is not zero: its order follows the layout.
    2. fp32 operands go in pieces (products.py), in one order.
    3. `x + tl.dot(a, b)` is never written, since it becomes dot(a, b, acc=x).
    4. enable_fp_fusion=False: the fusion of products into sums could differ from kernel to kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from twinfer.kernels.gdn import chunks, singles
from twinfer.kernels.gdn.state import GdnState
from twinfer.kernels.gdn.tiles import ROUNDS, CommitTile, LongTile, SingleTile
from twinfer.kernels.gdn.workspace import Workspace

_OPTIONS = {"enable_fp_fusion": False}


def _sizes(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """Shapes that every kernel is compiled for. Raises ValueError where value heads do not divide among key heads."""
    (num_key_heads, key_dim), (num_value_heads, value_dim) = q.shape[1:], v.shape[1:]
    if num_value_heads % num_key_heads:
        raise ValueError(f"gdn: {num_value_heads} value heads are not a multiple of {num_key_heads} key heads")
    return {"NK": num_key_heads, "NV": num_value_heads, "DK": key_dim, "DV": value_dim}


def _divides(name: str, tile: int, size: int) -> None:
    if tile < 16 or size % tile:
        raise ValueError(f"gdn: a tile of {tile} does not divide {name} {size}")


def _only(sizes: dict[str, int], *names: str) -> dict[str, int]:
    return {name: sizes[name] for name in names}


def _pieces(high: torch.Tensor, low: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pieces as pointers; where there is no second one nothing is read through its pointer."""
    return high, high if low is None else low


def _anchor(state: GdnState) -> tuple[torch.Tensor, torch.Tensor]:
    return _pieces(state.anchor if state.anchor_high is None else state.anchor_high, state.anchor_low)


def gdn_longs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: GdnState,
    workspace: Workspace,
    tasks: torch.Tensor,
    longs: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    tile: LongTile,
) -> None:
    """Outputs of all long rows of a step, and their state. Launches programs for every entry of tasks and longs; those beyond the counts leave at once.

    q, k       [T, nk, dk] model dtype, normed and scaled
    v          [T, nv, dv] model dtype
    log_decay  [T, nv] float32; beta likewise
    tasks      [at least 1, 4] int32, longs [at least 1, 6] int32, counts [4] int32: as tasks.plan_lists writes them
    out        [T, nv, dv] model dtype; tokens of other rows stay as they are
    """
    sizes, precision = _sizes(q, v), state.precision
    _divides("value_head_dim", tile.bv, sizes["DV"])
    num_tasks, num_longs, heads = len(tasks), len(longs), sizes["NV"]
    sp, ss = precision.pieces, precision.anchor_pieces
    t, m = _pieces(workspace.t_high, workspace.t_low), _pieces(workspace.m_high, workspace.m_low)
    chunks.decay_sums_kernel[(num_tasks,)](
        log_decay, beta, state.decay_sums, state.beta, tasks, counts, workspace.sums, workspace.strength,
        NV=heads, NVP=triton.next_power_of_2(heads), num_warps=1, **_OPTIONS,
    )  # fmt: skip
    chunks.key_side_kernel[(num_tasks, heads)](
        q, k, state.keys, state.decay_sums, state.beta, *_pieces(state.t_high, state.t_low), *_pieces(state.x_high, state.x_low), tasks, counts,
        workspace.sums, workspace.strength, *t, *m, workspace.diagonal,
        **_only(sizes, "NK", "NV", "DK"), SP=sp, ROUNDS=ROUNDS, num_warps=tile.key_warps, **_OPTIONS,
    )  # fmt: skip
    chunks.value_side_kernel[(sizes["DV"] // tile.bv, heads, num_longs)](
        q, k, v, state.keys, state.anchor, *_anchor(state), *_pieces(state.r_high, state.r_low), longs, counts, workspace.sums, workspace.strength, *t, *m,
        workspace.diagonal, out,
        **sizes, BV=tile.bv, SP=sp, SS=ss, PIECES=state.anchor_high is not None, num_warps=tile.value_warps, num_stages=tile.stages, **_OPTIONS,
    )  # fmt: skip
    chunks.leave_keys_kernel[(num_longs, sizes["NK"])](k, state.keys, longs, counts, **_only(sizes, "NK", "DK"), num_warps=4, **_OPTIONS)


def gdn_singles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: GdnState,
    workspace: Workspace,
    entries: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    tile: SingleTile,
) -> None:
    """Outputs of all single rows of a step, and their rows of the state; not the anchor (`gdn_commits`). Tensors as in `gdn_longs`; entries [at least 1, 3]
    int32. Launches programs for every entry; those beyond the count leave at once."""
    sizes, precision = _sizes(q, v), state.precision
    _divides("value_head_dim", tile.bv, sizes["DV"])
    _divides("value_head_dim", tile.second_bv, sizes["DV"])
    _divides("key_head_dim", tile.bk, sizes["DK"])
    programs = len(entries) * sizes["NV"]
    arguments = (
        q, k, v, log_decay, beta, state.keys, state.decay_sums, state.beta, *_anchor(state), *_pieces(state.t_high, state.t_low),
        *_pieces(state.x_high, state.x_low), *_pieces(state.r_high, state.r_low), entries, counts, workspace.weights, workspace.streamed, out,
    )  # fmt: skip
    common: dict[str, Any] = {**sizes, "BK": tile.bk, "STAGES": tile.stages, "SP": precision.pieces, "SS": precision.anchor_pieces, **_OPTIONS}
    tiles = sizes["DV"] // tile.bv
    if tile.fused:
        singles.single_kernel[(tiles * programs,)](*arguments, PART=0, BV=tile.bv, num_warps=tile.warps, **common)
    else:
        singles.single_kernel[((tiles + 1) * programs,)](*arguments, PART=1, BV=tile.bv, num_warps=tile.warps, **common)
        second = sizes["DV"] // tile.second_bv
        singles.single_kernel[(second * programs,)](*arguments, PART=2, BV=tile.second_bv, num_warps=tile.second_warps, **common)


def gdn_commits(state: GdnState, entries: torch.Tensor, counts: torch.Tensor, tile: CommitTile) -> None:
    """The anchors of chunks that single rows of this step have filled; after `gdn_singles`. entries [at least 1, 2] int32. Launches programs for every
    entry; those beyond the count leave at once."""
    (num_value_heads, key_dim, value_dim), precision = state.anchor.shape[1:], state.precision
    _divides("value_head_dim", tile.bv, value_dim)
    _divides("key_head_dim", tile.bk, key_dim)
    commit_sizes = {"NK": state.keys.shape[1], "NV": num_value_heads, "DK": key_dim, "DV": value_dim}
    singles.commit_kernel[(value_dim // tile.bv * num_value_heads * len(entries),)](
        state.keys, state.decay_sums, state.anchor, *_anchor(state), *_pieces(state.t_high, state.t_low), *_pieces(state.r_high, state.r_low), entries,
        counts, **commit_sizes, BV=tile.bv, BK=tile.bk, SP=precision.pieces, SS=precision.anchor_pieces, PIECES=state.anchor_high is not None,
        num_warps=tile.warps, **_OPTIONS,
    )  # fmt: skip
