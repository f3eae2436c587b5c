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
def _scaled(x, scale, Q_WEIGHT, K_WEIGHT, is_query, d, inside, DTYPE: tl.constexpr, CENTRED: tl.constexpr):
    """x [HEADS, n], dims d of some heads, as their norm gives them: by `scale`, rounded, times the weight, rounded; CENTRED: times 1 + weight, rounded once."""
    weight = tl.where(is_query, tl.load(Q_WEIGHT + d, mask=is_query & inside, other=0.0), tl.load(K_WEIGHT + d, mask=(~is_query) & inside, other=0.0))
    if CENTRED:
        return (x * scale * (1.0 + weight.to(tl.float32))).to(DTYPE).to(tl.float32)
    else:
        return ((x * scale).to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


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
    ROTARY: tl.constexpr,
    Q_STEP: tl.constexpr,
    CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (T, cdiv(H, HEADS) + 2 cdiv(K, HEADS)): the blocks of query heads, of key heads, of value heads.

    k_page, k_slot, k_head: strides of KEYS in elements; v_* of VALUES. The first ROTARY dims of a head turn; Q_STEP 2: a gate lies behind each query.
    Where all dims turn, a head's dims j and j + D / 2 are held as two tiles [HEADS, D / 2]; else as one tile, beside which lie their partners.
    """
    HALF: tl.constexpr = D // 2
    DTYPE: tl.constexpr = QKV.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(H, HEADS)
    key_blocks = tl.cdiv(K, HEADS)
    row = QKV + t * (Q_STEP * H + 2 * K) * D
    j = tl.arange(0, HALF)[None, :]
    lane = tl.arange(0, HEADS)[:, None]
    slot = tl.load(WRITE_SLOTS + t)
    page = slot // page_size
    offset = slot % page_size
    if block >= query_blocks + key_blocks:
        head = (block - query_blocks - key_blocks) * HEADS + lane
        inside = (head < K) & (j < HALF)
        value = row + (Q_STEP * H + K + head) * D + j
        kept = VALUES + page * v_page + offset * v_slot + head.to(tl.int64) * v_head + j
        tl.store(kept, tl.load(value, mask=inside), mask=inside)
        tl.store(kept + HALF, tl.load(value + HALF, mask=inside), mask=inside)
    else:
        is_query = block < query_blocks
        head = tl.where(is_query, block, block - query_blocks) * HEADS + lane
        kept_head = head < tl.where(is_query, H, K)
        source = row + (tl.where(is_query, Q_STEP * head, Q_STEP * H + head)) * D
        table = TABLE + tl.load(POSITIONS + t).to(tl.int64) * 2 * ROTARY
        if is_query:
            target = Q + (t * H + head) * D
        else:
            target = KEYS + page * k_page + offset * k_slot + head.to(tl.int64) * k_head
        if ROTARY == D:
            turning = kept_head & (j < HALF)
            first = tl.load(source + j, mask=turning, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + j, mask=turning, other=0.0).to(tl.float32)
            if Q_WEIGHT is not None:
                scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
                first = _scaled(first, scale, Q_WEIGHT, K_WEIGHT, is_query, j, j < HALF, DTYPE, CENTRED)
                second = _scaled(second, scale, Q_WEIGHT, K_WEIGHT, is_query, HALF + j, j < HALF, DTYPE, CENTRED)
            cos_first = tl.load(table + j).to(tl.float32)
            cos_second = tl.load(table + HALF + j).to(tl.float32)
            sin_first = tl.load(table + ROTARY + j).to(tl.float32)
            sin_second = tl.load(table + ROTARY + HALF + j).to(tl.float32)
            turned_first = (first * cos_first).to(DTYPE).to(tl.float32) - (second * sin_first).to(DTYPE).to(tl.float32)
            turned_second = (second * cos_second).to(DTYPE).to(tl.float32) + (first * sin_second).to(DTYPE).to(tl.float32)
            tl.store(target + j, turned_first.to(DTYPE), mask=turning)
            tl.store(target + HALF + j, turned_second.to(DTYPE), mask=turning)
        else:
            TURN: tl.constexpr = ROTARY // 2
            d = tl.arange(0, D)[None, :]
            whole = kept_head & (d < D)
            partner = tl.where(d < TURN, d + TURN, tl.where(d < ROTARY, d - TURN, d))
            own = tl.load(source + d, mask=whole, other=0.0).to(tl.float32)
            other = tl.load(source + partner, mask=whole, other=0.0).to(tl.float32)
            if Q_WEIGHT is not None:
                scale = tl.rsqrt(tl.sum(own * own, axis=1) / D + eps)[:, None]
                own = _scaled(own, scale, Q_WEIGHT, K_WEIGHT, is_query, d, d < D, DTYPE, CENTRED)
                other = _scaled(other, scale, Q_WEIGHT, K_WEIGHT, is_query, partner, d < D, DTYPE, CENTRED)
            cos = tl.load(table + d, mask=d < ROTARY, other=0.0).to(tl.float32)
            sin = tl.load(table + ROTARY + d, mask=d < ROTARY, other=0.0).to(tl.float32)
            across = (other * sin).to(DTYPE).to(tl.float32)
            turned = (own * cos).to(DTYPE).to(tl.float32) + tl.where(d < TURN, -across, across)
            tl.store(target + d, tl.where(d < ROTARY, turned, own).to(DTYPE), mask=whole)


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
    centred: bool = False,
) -> None:
    """The call of `plain.qk_norm_rope_write`; all tensors contiguous but for keys and values."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    gated = qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim
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
        ROTARY=rope_table.shape[2],
        Q_STEP=2 if gated else 1,
        CENTRED=centred,
        HEADS=heads,
        num_warps=warps,
        enable_fp_fusion=False,
    )
