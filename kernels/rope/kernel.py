"""QK norm, rotary embedding and the paged cache write in Triton: one program a token and a block of its heads. It decides no slot.

A product of two bf16 or fp16 values is exact in fp32, and rounding it to the dtype is what the same operation in the dtype gives: the roundings are
those of eager PyTorch. Launches switch the fusion of products into sums off: with it the compiler sees through the casts, narrows the arithmetic to
the dtype and drops the rounding of a product (`fma.rn.bf16x2` in the PTX of Triton 3.7).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinfer.kernels.rope.tiles import head_tile


@triton.jit
def qk_norm_rope_write_kernel(
    QKV,
    Q_WEIGHT,
    K_WEIGHT,
    POSITIONS,
    WRITE_SLOTS,
    TABLE,
    Q,
    KEYS,
    VALUES,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    H,
    K,
    page_size,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (T, cdiv(H, HEADS) + 2 cdiv(K, HEADS)): the blocks of query heads, of key heads, of value heads.

    k_page, k_slot, k_head: strides of KEYS in elements; v_* of VALUES. A head's dims j and j + D / 2 are held as two tiles [HEADS, D / 2].
    """
    HALF: tl.constexpr = D // 2
    DTYPE: tl.constexpr = QKV.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(H, HEADS)
    key_blocks = tl.cdiv(K, HEADS)
    row = QKV + t * (H + 2 * K) * D
    j = tl.arange(0, HALF)[None, :]
    lane = tl.arange(0, HEADS)[:, None]
    slot = tl.load(WRITE_SLOTS + t)
    page = slot // page_size
    offset = slot % page_size
    if block >= query_blocks + key_blocks:
        head = (block - query_blocks - key_blocks) * HEADS + lane
        inside = (head < K) & (j < HALF)
        value = row + (H + K + head) * D + j
        kept = VALUES + page * v_page + offset * v_slot + head.to(tl.int64) * v_head + j
        tl.store(kept, tl.load(value, mask=inside), mask=inside)
        tl.store(kept + HALF, tl.load(value + HALF, mask=inside), mask=inside)
    else:
        is_query = block < query_blocks
        head = tl.where(is_query, block, block - query_blocks) * HEADS + lane
        inside = (head < tl.where(is_query, H, K)) & (j < HALF)
        source = row + (tl.where(is_query, 0, H) + head) * D + j
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if Q_WEIGHT is not None:
            scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
            ours = is_query & (j < HALF)
            w_first = tl.where(is_query, tl.load(Q_WEIGHT + j, mask=ours, other=0.0), tl.load(K_WEIGHT + j, mask=~ours, other=0.0))
            w_second = tl.where(is_query, tl.load(Q_WEIGHT + HALF + j, mask=ours, other=0.0), tl.load(K_WEIGHT + HALF + j, mask=~ours, other=0.0))
            first = ((first * scale).to(DTYPE).to(tl.float32) * w_first.to(tl.float32)).to(DTYPE).to(tl.float32)
            second = ((second * scale).to(DTYPE).to(tl.float32) * w_second.to(tl.float32)).to(DTYPE).to(tl.float32)
        cos = TABLE + tl.load(POSITIONS + t).to(tl.int64) * 2 * D + j
        sin = cos + D
        cos_first = tl.load(cos).to(tl.float32)
        cos_second = tl.load(cos + HALF).to(tl.float32)
        sin_first = tl.load(sin).to(tl.float32)
        sin_second = tl.load(sin + HALF).to(tl.float32)
        turned_first = (first * cos_first).to(DTYPE).to(tl.float32) - (second * sin_first).to(DTYPE).to(tl.float32)
        turned_second = (second * cos_second).to(DTYPE).to(tl.float32) + (first * sin_second).to(DTYPE).to(tl.float32)
        if is_query:
            target = Q + (t * H + head) * D + j
        else:
            target = KEYS + page * k_page + offset * k_slot + head.to(tl.int64) * k_head + j
        tl.store(target, turned_first.to(DTYPE), mask=inside)
        tl.store(target + HALF, turned_second.to(DTYPE), mask=inside)


def qk_norm_rope_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    rope_table: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> None:
    """The call of `plain.qk_norm_rope_write`; all tensors contiguous but for keys and values."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    heads, warps = head_tile(head_dim)
    grid = (num_tokens, triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))
    qk_norm_rope_write_kernel[grid](
        qkv,
        q_weight,
        k_weight,
        positions,
        write_slots,
        rope_table,
        q,
        keys,
        values,
        *keys.stride()[:3],
        *values.stride()[:3],
        num_heads,
        num_kv_heads,
        page_size,
        eps,
        D=head_dim,
        HEADS=heads,
        num_warps=warps,
        enable_fp_fusion=False,
    )
