"""A Gated DeltaNet layer's inputs in Triton: convolution, silu, l2 norm and gates; and the convolution's history. Nothing of the recurrence.

One program a token and a block of its channels: bits of a token depend on nothing but its own inputs. Taps are added oldest first. Launches switch the
fusion of products into sums off, so that a tap rounds alike wherever it comes from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinfer.kernels.gdn_inputs.plain import L2_EPS
from twinfer.kernels.gdn_inputs.tiles import BLOCK, WARPS, head_tile


@triton.jit
def convolved(PROJECTED, WEIGHT, HISTORY, t, position, own, stride, C, channel, inside, TAPS: tl.constexpr):
    """silu of the convolution at token t's `channel`s, fp32 values that are exact in the model's dtype. own: tokens of the row right before t, at most
    TAPS - 1; older ones come from HISTORY [TAPS - 1, C]. Before position 0 there is nothing to read."""
    DTYPE: tl.constexpr = PROJECTED.dtype.element_ty
    total = tl.zeros(channel.shape, tl.float32)
    for i in tl.static_range(TAPS):
        back = TAPS - 1 - i
        there = inside & (position >= back)
        fresh = tl.load(PROJECTED + (t - back) * stride + channel, mask=there & (own >= back), other=0.0)
        old = tl.load(HISTORY + (i + own).to(tl.int64) * C + channel, mask=there & (own < back), other=0.0)
        weight = tl.load(WEIGHT + channel * TAPS + i, mask=inside, other=0.0)
        total += weight.to(tl.float32) * tl.where(own >= back, fresh, old).to(tl.float32)
    total = total.to(DTYPE).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(DTYPE).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), x itself above 20 as in PyTorch. The quotient mends the rounding of 1 + exp(x): a small result keeps its digits."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + y
    mended = tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(u == 1.0, y, mended))


@triton.jit
def gdn_inputs_kernel(
    PROJECTED,
    WEIGHT,
    A_LOG,
    DT_BIAS,
    HISTORIES,
    POSITIONS,
    TOKEN_ROW,
    STATE_SLOT,
    Q,
    K,
    V,
    LOG_DECAY,
    BETA,
    stride,
    C,
    scale,
    eps,
    NK: tl.constexpr,
    NV: tl.constexpr,
    NVP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T, 2 cdiv(NK, HEADS) + cdiv(NV DV, BLOCK) + 1): blocks of query heads, of key heads, of values, and the gates. stride: of a token in PROJECTED,
    in elements. NVP: next power of two of NV."""
    KEY_BLOCKS: tl.constexpr = (NK + HEADS - 1) // HEADS
    VALUE_BLOCKS: tl.constexpr = (NV * DV + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = PROJECTED.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(TOKEN_ROW + t)
    if row >= 0:
        if block == 2 * KEY_BLOCKS + VALUE_BLOCKS:
            j = tl.arange(0, NVP)
            at = PROJECTED + t * stride + C + NV * DV + j
            b = tl.load(at, mask=j < NV, other=0.0).to(tl.float32)
            a = tl.load(at + NV, mask=j < NV, other=0.0).to(tl.float32)
            rate = -tl.exp(tl.load(A_LOG + j, mask=j < NV, other=0.0).to(tl.float32))
            bias = tl.load(DT_BIAS + j, mask=j < NV, other=0.0).to(tl.float32)
            tl.store(LOG_DECAY + t * NV + j, rate * softplus(a + bias), mask=j < NV)
            tl.store(BETA + t * NV + j, (1.0 / (1.0 + tl.exp(-b))).to(DTYPE).to(tl.float32), mask=j < NV)
        else:
            own = tl.zeros((), tl.int32)
            for i in tl.static_range(1, TAPS):  # a row's tokens are neighbours: with the i-th before, all between are its own
                own += (tl.load(TOKEN_ROW + t - i, mask=t >= i, other=-1) == row).to(tl.int32)
            position = tl.load(POSITIONS + t)
            history = HISTORIES + tl.load(STATE_SLOT + row).to(tl.int64) * (TAPS - 1) * C
            if block < 2 * KEY_BLOCKS:
                is_query = block < KEY_BLOCKS
                head = tl.where(is_query, block, block - KEY_BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None]
                place = head * DK + tl.arange(0, DK)[None, :]
                inside = (head < NK) & (place >= 0)
                x = convolved(PROJECTED, WEIGHT, history, t, position, own, stride, C, tl.where(is_query, 0, NK * DK) + place, inside, TAPS)
                x = x * tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
                if is_query:
                    tl.store(Q + t * NK * DK + place, (x * scale).to(DTYPE), mask=inside)
                else:
                    tl.store(K + t * NK * DK + place, x.to(DTYPE), mask=inside)
            else:
                channel = (block - 2 * KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
                value = convolved(PROJECTED, WEIGHT, history, t, position, own, stride, C, 2 * NK * DK + channel, channel < NV * DV, TAPS)
                tl.store(V + t * NV * DV + channel, value.to(DTYPE), mask=channel < NV * DV)


@triton.jit
def write_histories_kernel(PROJECTED, ROW_INDPTR, CONTEXT, STATE_SLOT, HISTORIES, stride, C, KEPT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, cdiv(C, BLOCK)). KEPT: K - 1; PLACES: its next power of two."""
    row = tl.program_id(0)
    slot = tl.load(STATE_SLOT + row).to(tl.int64)
    if slot >= 0:
        begin = tl.load(ROW_INDPTR + row)
        end = tl.load(ROW_INDPTR + row + 1)
        i = tl.arange(0, PLACES)[:, None]
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (i < KEPT) & (channel < C)
        token = end - KEPT + i
        written = inside & (tl.load(CONTEXT + row) - KEPT + i >= 0)
        history = HISTORIES + slot * KEPT * C + channel
        fresh = tl.load(PROJECTED + token.to(tl.int64) * stride + channel, mask=written & (token >= begin), other=0.0)
        old = tl.load(history + (end - begin + i) * C, mask=written & (token < begin), other=0.0)
        tl.debug_barrier()  # an old input moves to where another thread may still be reading
        tl.store(history + i * C, tl.where(token >= begin, fresh, old), mask=inside)


def gdn_inputs(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    histories: torch.Tensor,
    positions: torch.Tensor,
    token_row: torch.Tensor,
    state_slot: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    """The call of `plain.gdn_inputs`; all tensors contiguous but for the rows of projected. Launches programs for every token of q."""
    num_tokens, num_key_heads, key_dim = q.shape
    num_value_heads, value_dim = v.shape[1:]
    channels, taps = conv_weight.shape
    heads = head_tile(key_dim)
    width = channels + num_value_heads * (value_dim + 2)
    if channels != 2 * num_key_heads * key_dim + num_value_heads * value_dim or projected.shape[1] != width or projected.stride(1) != 1:
        raise ValueError(f"gdn_inputs: rows of {projected.shape[1]} and {channels} channels do not hold {q.shape[1:]} queries and {v.shape[1:]} values")
    if histories.shape[1:] != (taps - 1, channels) or not histories.is_contiguous():
        raise ValueError(f"gdn_inputs: histories of {taps - 1} inputs of {channels} channels are needed, got {tuple(histories.shape)}")
    grid = (num_tokens, 2 * triton.cdiv(num_key_heads, heads) + triton.cdiv(num_value_heads * value_dim, BLOCK) + 1)
    gdn_inputs_kernel[grid](
        projected,
        conv_weight,
        a_log,
        dt_bias,
        histories,
        positions,
        token_row,
        state_slot,
        q,
        k,
        v,
        log_decay,
        beta,
        projected.stride(0),
        channels,
        key_dim**-0.5,
        L2_EPS,
        NK=num_key_heads,
        NV=num_value_heads,
        NVP=triton.next_power_of_2(num_value_heads),
        DK=key_dim,
        DV=value_dim,
        TAPS=taps,
        HEADS=heads,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def write_histories(projected: torch.Tensor, row_indptr: torch.Tensor, context: torch.Tensor, state_slot: torch.Tensor, histories: torch.Tensor) -> None:
    """The call of `plain.write_histories`; projected with contiguous rows of any stride, the rest contiguous. Launches programs for every row of state_slot."""
    kept, channels = histories.shape[1:]
    grid = (len(state_slot), triton.cdiv(channels, BLOCK))
    places = triton.next_power_of_2(kept)
    write_histories_kernel[grid](
        projected, row_indptr, context, state_slot, histories, projected.stride(0), channels, KEPT=kept, PLACES=places, BLOCK=BLOCK, num_warps=WARPS
    )
