"""The output gate in Triton: element by element, nothing is summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4  # 8 elements a thread: one load of 16 bytes in bf16. Not tuned on a GPU yet


@triton.jit
def output_gate_kernel(QKV, ATTENDED, stride, H, D: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks of H * D). Element e of head h of token t is multiplied by the sigmoid of QKV[t, (2 h + 1) D + e]."""
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H * D
    gate = tl.load(QKV + t * stride + (2 * (at // D) + 1) * D + at % D, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(ATTENDED + t * H * D + at, mask=inside, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = ATTENDED.dtype.element_ty
    share = (1.0 / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32)
    tl.store(ATTENDED + t * H * D + at, (x * share).to(DTYPE), mask=inside)


def output_gate(qkv: torch.Tensor, attended: torch.Tensor) -> None:
    """The call of `plain.output_gate`; attended contiguous, and each token's columns of qkv."""
    num_tokens, num_heads, head_dim = attended.shape
    width = num_heads * head_dim
    block = min(BLOCK, triton.next_power_of_2(width))
    output_gate_kernel[(num_tokens, triton.cdiv(width, block))](qkv, attended, qkv.stride(0), num_heads, D=head_dim, BLOCK=block, num_warps=WARPS)
