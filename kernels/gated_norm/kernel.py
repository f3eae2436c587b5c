"""The gated norm in Triton: one program a token and a block of its heads, so that a token's bits depend on nothing else. Knows nothing of states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinfer.kernels.gated_norm.tiles import WARPS, head_tile


@triton.jit
def gated_rms_norm_kernel(X, GATE, WEIGHT, OUT, stride, H, eps, D: tl.constexpr, HEADS: tl.constexpr):
    """Grid (T, cdiv(H, HEADS)). stride: of a token in GATE, in elements."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, D)[None, :]
    place = head * D + column
    inside = (head < H) & (column < D)
    u = tl.load(X + t * H * D + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(GATE + t * stride + place, mask=inside, other=0.0).to(tl.float32)
    u = (u * tl.rsqrt(tl.sum(u * u, axis=1) / D + eps)[:, None]).to(DTYPE).to(tl.float32)
    # Two 16-bit values have an exact product in fp32; rounding it to the weight's dtype is what a product in that dtype gives.
    u = (tl.load(WEIGHT + column).to(tl.float32) * u).to(WEIGHT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + t * H * D + place, (u * (gate / (1.0 + tl.exp(-gate)))).to(DTYPE), mask=inside)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """The call of `plain.gated_rms_norm`; all tensors contiguous but for the rows of gate."""
    num_tokens, num_heads, head_dim = x.shape
    if gate.shape != (num_tokens, num_heads * head_dim) or gate.stride(1) != 1:
        raise ValueError(f"gated_rms_norm: a gate of {tuple(gate.shape)} with strides {gate.stride()} for heads of {tuple(x.shape)}")
    heads = head_tile(head_dim)
    grid = (num_tokens, triton.cdiv(num_heads, heads))
    gated_rms_norm_kernel[grid](
        x, gate, weight, out, gate.stride(0), num_heads, eps, D=head_dim, HEADS=heads, num_warps=WARPS, enable_fp_fusion=False
    )
