"""A Gated DeltaNet layer's inputs in plain PyTorch, token by token. Not used by the engine: it says what the kernels compute.

Shapes: T tokens of the step; nk key heads of dk, nv value heads of dv; C = 2 nk dk + nv dv channels of the convolution; K its taps.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

L2_EPS = 1e-6  # of this layer's queries and keys; no field of config.json


def _normalised(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """x [heads, d] scaled to length 1 in each head."""
    u = x.to(wide)
    return u * torch.rsqrt((u * u).sum(-1, keepdim=True) + L2_EPS)


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
    """Queries, keys, values and gates of every token; what belongs to a padding token stays as it was.

    projected    [T, C + nv dv + 2 nv], rows of any stride: channels of q, k and v, then z (not read), then b, then a
    conv_weight  [C, K], its last tap is the token's own
    a_log        [nv], float32 or projected's dtype; dt_bias likewise
    histories    [slots, K - 1, C]: the inputs before a row's first token, oldest first. One before position 0 is zero and is not read
    positions    [T] int32
    token_row    [T] int32: the row of each token, whose tokens are neighbours in ascending position; -1 for padding
    state_slot   [rows] int32, the row's entry of histories
    q, k         [T, nk, dk], of length 1 (q times dk^-0.5), rounded once
    v            [T, nv, dv]
    log_decay    [T, nv] float32, at most 0; beta likewise, from 0 to 1 and rounded to projected's dtype

    The convolution's sum is rounded to projected's dtype, and its silu again.
    """
    wide = torch.float64 if projected.dtype == torch.float64 else torch.float32
    channels, taps = conv_weight.shape
    num_values, num_heads = v[0].numel(), v.shape[1]
    for t, row in enumerate(token_row.tolist()):
        if row < 0:
            continue
        own = 0  # tokens of the row before this one, as far as the convolution sees
        while own < min(t, taps - 1) and int(token_row[t - own - 1]) == row:
            own += 1
        total = torch.zeros(channels, dtype=wide, device=projected.device)
        for back in range(taps - 1, -1, -1):
            if int(positions[t]) >= back:
                x = projected[t - back, :channels] if back <= own else histories[int(state_slot[row]), taps - 1 + own - back]
                total = total + conv_weight[:, taps - 1 - back].to(wide) * x.to(wide)
        mixed = F.silu(total.to(projected.dtype))  # [C]
        query, key, value = torch.split(mixed, [q[t].numel(), k[t].numel(), num_values])
        q[t] = (_normalised(query.view(q[t].shape), wide) * q.shape[-1] ** -0.5).to(q.dtype)
        k[t] = _normalised(key.view(k[t].shape), wide).to(k.dtype)
        v[t] = value.view(v[t].shape)
        b, a = torch.split(projected[t, channels + num_values :], num_heads)
        beta[t] = torch.sigmoid(b).to(beta.dtype)
        log_decay[t] = (-a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))).to(log_decay.dtype)


def write_histories(projected: torch.Tensor, row_indptr: torch.Tensor, context: torch.Tensor, state_slot: torch.Tensor, histories: torch.Tensor) -> None:
    """Leaves the last K - 1 inputs of every row in its slot, for the step after. Comes after `gdn_inputs`, which reads what it overwrites.

    projected   [T, at least C], as in `gdn_inputs`
    row_indptr  [rows + 1] int32: tokens row_indptr[i] .. row_indptr[i + 1] are row i's
    context     [rows] int32: tokens of the request behind this step, its position after the last token
    state_slot  [rows] int32, all different but for -1: a padding row, which has no history
    histories   [slots, K - 1, C]: a row shorter than K - 1 keeps some of the old ones; those before position 0 become zeros
    """
    kept, channels = histories.shape[1:]
    for row, slot in enumerate(state_slot.tolist()):
        if slot < 0:
            continue
        begin, end, seen = int(row_indptr[row]), int(row_indptr[row + 1]), int(context[row])
        old = histories[slot].clone()  # [K - 1, C]
        for i in range(kept):
            token = end - kept + i
            if seen - kept + i < 0:
                histories[slot, i] = 0
            else:
                histories[slot, i] = projected[token, :channels] if token >= begin else old[end - begin + i]
