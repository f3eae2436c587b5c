"""A layer's experts in Triton, and their launches. Which tiles serve is in tiles.py; who goes where, in kernels/router.

Law 2: an element of a product is one chain of tl.dot over K in ascending order, from zero, as in kernels/matmul; so its bits are the same in every tile, and
the same as that product's. A pair's row is computed from that pair alone: neither the other pairs of its tile, nor its place in it, show. The sum of a
token's experts goes by their numbers. Nothing is added atomically, and each result has one place.

Grids are made from capacities; a program reads what there is on the device, and leaves at once where there is nothing for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twinfer.kernels.experts.tiles import COMBINE_BLOCK, COMBINE_WARPS, Tile, Tiling, tiling_for


@triton.jit(do_not_specialize=["CAPACITY"])
def experts_kernel(
    X,
    PAIRS,
    TILES,
    NUM_TILES,
    W,
    OUT,
    CAPACITY,
    N,
    K,
    num_per_token,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
):
    """Grid (CAPACITY tiles of pairs x tiles of N). One tile of pairs, of one expert, times BN of its weight rows. W is a pointer, or with TMA a descriptor of
    [experts and their rows, K].

    GATED: X holds tokens, W [E, 2 N, K] gate rows before up rows, and OUT [P, N] silu(gate) up of the pairs in their order by expert. Otherwise X holds the
    pairs in that order, W is [E, N, K], and OUT [P, N] has each pair in its own place.
    SWAP: the weight is the first operand, so that its rows fill the 64 rows of wgmma and the tile of pairs may be 16.
    EVEN_K: BK divides K. Tiles run in groups of GROUP, so that a weight that several of them need is read from L2.
    """
    program = tl.program_id(0)
    width = GROUP * tl.cdiv(N, BN)
    leader = program // width * GROUP
    high = tl.minimum(CAPACITY - leader, GROUP)
    tile = leader + program % width % high
    n0 = program % width // high * BN
    if tile >= tl.load(NUM_TILES):
        return
    expert = tl.load(TILES + tile * 3)
    first = tl.load(TILES + tile * 3 + 1)
    count = tl.load(TILES + tile * 3 + 2)
    i = tl.arange(0, ROWS)
    there = i < count
    pair = tl.load(PAIRS + first + i, mask=there, other=0)
    if GATED:
        source = (pair // num_per_token).to(tl.int64)
        target = (first + i).to(tl.int64)
    else:
        source = (first + i).to(tl.int64)
        target = pair.to(tl.int64)
    n = n0 + tl.arange(0, BN)
    j = tl.arange(0, BK)
    x_rows = X + source[:, None] * K + j[None, :]
    if GATED:
        w0 = expert * 2 * N
    else:
        w0 = expert * N
    if TMA == 0:
        row = w0.to(tl.int64) + tl.minimum(n, N - 1)  # rows past N: read again, never stored
        w_rows = W + row[:, None] * K + j[None, :]
        up_rows = w_rows + N.to(tl.int64) * K
    if SWAP:
        total = tl.zeros((BN, ROWS), tl.float32)
    else:
        total = tl.zeros((ROWS, BN), tl.float32)
    if GATED:
        total_up = total
    for k in range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_rows + k, mask=there[:, None], other=0.0)
        else:
            inside = (k + j < K)[None, :]
            x = tl.load(x_rows + k, mask=there[:, None] & inside, other=0.0)
        if TMA:
            w = W.load([w0 + n0, k])
        elif EVEN_K:
            w = tl.load(w_rows + k)
        else:
            w = tl.load(w_rows + k, mask=inside, other=0.0)
        if SWAP:
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        if GATED:
            if TMA:
                up = W.load([w0 + N + n0, k])
            elif EVEN_K:
                up = tl.load(up_rows + k)
            else:
                up = tl.load(up_rows + k, mask=inside, other=0.0)
            if SWAP:
                total_up = tl.dot(up, tl.trans(x), total_up, input_precision="ieee")
            else:
                total_up = tl.dot(x, tl.trans(up), total_up, input_precision="ieee")
    if GATED:
        gate = total.to(OUT.dtype.element_ty).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(OUT.dtype.element_ty).to(tl.float32)
        result = silu * total_up.to(OUT.dtype.element_ty).to(tl.float32)
    else:
        result = total
    if SWAP:
        at = target[None, :] * N + n[:, None]
        keep = there[None, :] & (n < N)[:, None]
    else:
        at = target[:, None] * N + n[None, :]
        keep = there[:, None] & (n < N)[None, :]
    tl.store(OUT + at, result.to(OUT.dtype.element_ty), mask=keep)


@triton.jit
def combine_kernel(OUTPUTS, SHARES, EXPERTS, SHARED, SHARED_GATE, OUT, gate_stride, h, k: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks of h). The call of `plain.combine`: each addition one tl.fma, from the first expert on. gate_stride: from a token's gate to the next."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < h
    total = tl.zeros((BLOCK,), tl.float32)
    any_live = False
    for j in tl.static_range(k):
        live = tl.load(EXPERTS + t * k + j) >= 0
        any_live = any_live | live
        share = tl.load(SHARES + t * k + j, mask=live, other=0.0).to(tl.float32)
        output = tl.load(OUTPUTS + (t * k + j) * h + columns, mask=inside & live, other=0.0).to(tl.float32)
        total = tl.fma(output, share, total)
    if SHARED is not None:
        logit = tl.load(SHARED_GATE + t * gate_stride, mask=any_live, other=0.0).to(tl.float32)
        output = tl.load(SHARED + t * h + columns, mask=inside & any_live, other=0.0).to(tl.float32)
        total = tl.fma(output, 1.0 / (1.0 + tl.exp(-logit)), total)
    tl.store(OUT + t * h + columns, total.to(OUT.dtype.element_ty), mask=inside)


def constants(tile: Tile, rows: int, k: int, gated: bool) -> dict[str, Any]:
    """The constexprs of `experts_kernel` for tiles of `rows` pairs and a K."""
    own = {"BN": tile.bn, "BK": tile.bk, "SWAP": tile.swap, "TMA": tile.tma, "GROUP": tile.group}
    return own | {"ROWS": rows, "EVEN_K": k % tile.bk == 0, "GATED": gated}


@cache
def tiling(device: torch.device, dtype: torch.dtype, num_pairs: int, num_experts: int) -> Tiling:
    """The table's answer for a device: what `group` and both products of a step with room for num_pairs pairs are called with."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return tiling_for(capability, dtype, num_pairs, num_experts)


def _launch(
    x: torch.Tensor, lists: tuple[torch.Tensor, ...], weight: torch.Tensor, out: torch.Tensor, num_per_token: int, rows: int, tile: Tile, gated: bool
) -> None:
    """A descriptor needs rows that start on 16 bytes; without, the same tile reads through pointers."""
    pairs, tiles, num_tiles = lists
    k = weight.shape[2]
    n = weight.shape[1] // 2 if gated else weight.shape[1]
    if tile.tma and (k * x.element_size() % 16 or weight.data_ptr() % 16):
        tile = replace(tile, tma=False)
    source: Any = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.bn, tile.bk]) if tile.tma else weight
    grid = (len(tiles) * triton.cdiv(n, tile.bn),)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    experts_kernel[grid](x, pairs, tiles, num_tiles, source, out, len(tiles), n, k, num_per_token, **constants(tile, rows, k, gated), **options)


def grouped_gate_up(
    x: torch.Tensor,
    pairs: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    weight: torch.Tensor,
    activated: torch.Tensor,
    num_per_token: int,
    tiling: Tiling,
) -> None:
    """The call of `plain.gate_up`, for lists of tiles of tiling.rows pairs; all tensors contiguous."""
    _launch(x, (pairs, tiles, num_tiles), weight, activated, num_per_token, tiling.rows, tiling.gate_up, True)


def grouped_down(
    activated: torch.Tensor,
    pairs: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    weight: torch.Tensor,
    outputs: torch.Tensor,
    tiling: Tiling,
) -> None:
    """The call of `plain.down`, for lists of tiles of tiling.rows pairs; all tensors contiguous."""
    _launch(activated, (pairs, tiles, num_tiles), weight, outputs, 1, tiling.rows, tiling.down, False)


def combine(
    outputs: torch.Tensor,
    shares: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> None:
    """The call of `plain.combine`. shared_gate may be a column of something wider; all other tensors contiguous."""
    num_tokens, width = out.shape
    block = min(COMBINE_BLOCK, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block))
    stride = 1 if shared_gate is None else shared_gate.stride(0)
    combine_kernel[grid](outputs, shares, experts, shared, shared_gate, out, stride, width, k=experts.shape[1], BLOCK=block, num_warps=COMBINE_WARPS)
