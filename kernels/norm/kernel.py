"""RMS norm in Triton: one program a row, which it holds whole. Nothing is known here of batches, so a row's bits cannot depend on them.

The order of the sum follows from the width h alone: block and warps are functions of h. The compiler's layout also follows from what it knows of
the alignment, so rows must start on 16 bytes (buffers of the ledger do, with h a multiple of 8), or a row may round differently than elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinfer.kernels.norm.tiles import row_tile


@triton.jit
def _store_normed(u, WEIGHT, OUT, at, columns, inside, h, eps, DTYPE: tl.constexpr, CENTRED: tl.constexpr):
    """OUT[at + columns] = weight * round(u / root mean square of u), or (1 + weight) * that, rounded once; u is the row in fp32, zero outside of it."""
    scale = tl.rsqrt(tl.sum(u * u, axis=0) / h + eps)
    weight = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        normed = u * scale * (1.0 + weight)
    else:
        # A product of two bf16 or fp16 values is exact in fp32, so rounding it once is what a product in the dtype gives.
        normed = weight * (u * scale).to(DTYPE).to(tl.float32)
    tl.store(OUT + at + columns, normed.to(DTYPE), mask=inside)


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, h, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T,). OUT[t, :] = norm of X[t, :]. BLOCK: next power of two of h."""
    at = tl.program_id(0).to(tl.int64) * h
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    u = tl.load(X + at + columns, mask=inside, other=0.0).to(tl.float32)
    _store_normed(u, WEIGHT, OUT, at, columns, inside, h, eps, OUT.dtype.element_ty, CENTRED)


@triton.jit
def add_rms_norm_kernel(X, RESIDUAL, WEIGHT, OUT, h, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T,). RESIDUAL[t, :] += X[t, :], rounded; OUT[t, :] = norm of that."""
    at = tl.program_id(0).to(tl.int64) * h
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    x = tl.load(X + at + columns, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(RESIDUAL + at + columns, mask=inside, other=0.0).to(tl.float32)
    new = (old + x).to(OUT.dtype.element_ty)
    tl.store(RESIDUAL + at + columns, new, mask=inside)
    _store_normed(new.to(tl.float32), WEIGHT, OUT, at, columns, inside, h, eps, OUT.dtype.element_ty, CENTRED)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, centred: bool = False) -> None:
    """The call of `plain.rms_norm`; all tensors contiguous."""
    h = weight.shape[0]
    block, warps = row_tile(h)
    rms_norm_kernel[(out.shape[0],)](x, weight, out, h, eps, CENTRED=centred, BLOCK=block, num_warps=warps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, centred: bool = False) -> None:
    """The call of `plain.add_rms_norm`; all tensors contiguous."""
    h = weight.shape[0]
    block, warps = row_tile(h)
    add_rms_norm_kernel[(out.shape[0],)](x, residual, weight, out, h, eps, CENTRED=centred, BLOCK=block, num_warps=warps)
