"""Product of activations with a weight in Triton, and its launch. Which tile serves which shape is in tiles.py; where cuBLAS may serve, in cublas.py.

Law 2: an element is one chain of tl.dot over K in ascending order, from zero. On an H200 its bits were the same for every tile, either operand order,
through TMA or pointers, with mma.sync or wgmma, for M from 1 to 8192 (6696 of 6696 products for 0.6B and 8B, as many for 4B and 32B:
bench/probes/RESULTS.md); so the tile is free, and the table may choose it by M.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twinfer.kernels.matmul.tiles import Tile, tile_for


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    X,
    W,
    BIAS,
    OUT,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (tiles,). OUT[m, n] = sum over k of X[m, k] W[n, k], + BIAS[n]. X and W are pointers, or with TMA tensor descriptors.

    SWAP: the weight is the first operand, so that its rows fill the 64 rows of wgmma and the token tile may be 16.
    EVEN_K: BK divides K. Tiles run in groups of GROUP token tiles, so that a group's weights are read from L2.
    """
    tile = tl.program_id(0)
    token_tiles = tl.cdiv(M, BM)
    width = GROUP * tl.cdiv(N, BN)
    first = tile // width * GROUP
    high = tl.minimum(token_tiles - first, GROUP)
    m0 = (first + tile % width % high) * BM
    n0 = tile % width // high * BN
    m = (m0 + tl.arange(0, BM)).to(tl.int64)
    n = n0 + tl.arange(0, BN)
    j = tl.arange(0, BK)
    if TMA == 0:
        x_rows = X + m[:, None] * K + j[None, :]
        w_rows = W + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + j[None, :]  # rows past N: read again, never stored
        there = (m < M)[:, None]
    if SWAP:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if TMA:
            x = X.load([m0, k])
            w = W.load([n0, k])
        elif EVEN_K:
            x = tl.load(x_rows + k, mask=there, other=0.0)
            w = tl.load(w_rows + k)
        else:
            inside = (k + j < K)[None, :]
            x = tl.load(x_rows + k, mask=there & inside, other=0.0)
            w = tl.load(w_rows + k, mask=inside, other=0.0)
        if SWAP:
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    if SWAP:
        at = m[None, :] * N + n[:, None]
        keep = (m < M)[None, :] & (n < N)[:, None]
    else:
        at = m[:, None] * N + n[None, :]
        keep = (m < M)[:, None] & (n < N)[None, :]
    if BIAS is not None:
        bias = tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)
        if SWAP:
            total += bias[:, None]
        else:
            total += bias[None, :]
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=keep)


def constants(tile: Tile, k: int) -> dict[str, Any]:
    """The constexprs of `matmul_kernel` for a tile and a K."""
    return {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "SWAP": tile.swap, "TMA": tile.tma, "EVEN_K": k % tile.bk == 0, "GROUP": tile.group}


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> None:
    """The product by one given tile. A descriptor needs rows that start on 16 bytes; without, the same tile reads through pointers."""
    (m, k), n = x.shape, weight.shape[0]
    if tile.tma and (k * x.element_size() % 16 or x.data_ptr() % 16 or weight.data_ptr() % 16):
        tile = replace(tile, tma=False)
    source: tuple[Any, Any] = (x, weight)
    if tile.tma:
        source = TensorDescriptor.from_tensor(x, [tile.bm, tile.bk]), TensorDescriptor.from_tensor(weight, [tile.bn, tile.bk])
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn),)
    matmul_kernel[grid](*source, bias, out, m, n, k, **constants(tile, k), num_warps=tile.warps, num_stages=tile.stages)


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """The call of `plain.matmul`; all tensors contiguous."""
    launch(x, weight, out, bias, tile_for(_capability(x.device), x.dtype, x.shape[0], *weight.shape))
