"""Reference. Slow on purpose: the arithmetic of a Gated DeltaNet layer between its projections, as pure functions on one sequence's tensors.

The layer keeps no keys: a matrix per value head holds what was seen, decays, and is corrected by each token toward that token's value. Between two
calls a sequence carries that matrix, in wide, and the convolution's last inputs. Maths: model specification, section 3.4; the recurrence is that of
Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464). The order of operations and the roundings are those of transformers' code for
one token; its code for many tokens computes the same by chunks, and differs in the last bits of wide.

Shapes: T tokens of the sequence, at least 1; nk key heads of dk, nv value heads of dv; C = 2 nk dk + nv dv channels; K taps of the convolution.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from twinfer.reference.qwen3 import wide_dtype

L2_EPS = 1e-6  # of this layer's keys and queries; no field of config.json, and not rms_norm_eps


def causal_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every channel's own convolution over the token and the K - 1 before it, then silu: x [T, C] -> [T, C].

    weight [C, 1, K], its last tap is the token's own; history [K - 1, C], x of the tokens before, zeros where there were none. Both in x's dtype.
    Returns the history for the next call too: what came in last, before convolution and silu.
    """
    seen = torch.cat((history, x))  # [K - 1 + T, C]
    mixed = F.conv1d(seen.T[None], weight, groups=len(weight))[0]  # [C, T]
    return F.silu(mixed).T.contiguous(), seen[len(x) :]


def log_decay(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Logarithm of what each token leaves of the state: a [T, nv], a_log and dt_bias [nv] -> [T, nv] wide, at most 0."""
    wide = wide_dtype(a.dtype)
    return -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias)


def write_strength(b: torch.Tensor) -> torch.Tensor:
    """How far each token moves what the state recalls toward its own value: b [T, nv] -> [T, nv] from 0 to 1, rounded to b's dtype."""
    return torch.sigmoid(b)


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """x [..., dk] wide, scaled to length 1; a vector much shorter than sqrt(L2_EPS) stays short."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: q and k [T, nk, dk], v [T, nv, dv], decay (`log_decay`) and beta [T, nv], state [nv, dk, dv] wide -> output [T, nv, dv], state.

    Value head j reads key head j // (nv / nk). Everything is wide; the output is rounded to v's dtype.
    """
    wide, group = state.dtype, v.shape[1] // k.shape[1]
    q = l2_normalised(q.to(wide)).repeat_interleave(group, dim=1) / q.shape[-1] ** 0.5  # [T, nv, dk]
    k = l2_normalised(k.to(wide)).repeat_interleave(group, dim=1)  # [T, nv, dk]
    values, kept, beta = v.to(wide), decay.to(wide).exp(), beta.to(wide)  # [T, nv, dv], [T, nv], [T, nv]
    outputs = []
    for t in range(len(v)):
        state = state * kept[t, :, None, None]  # [nv, dk, dv]: decay comes first,
        recalled = (state * k[t, :, :, None]).sum(-2)  # [nv, dv]: so what is recalled has decayed
        delta = (values[t] - recalled) * beta[t, :, None]  # [nv, dv]
        state = state + k[t, :, :, None] * delta[:, None, :]  # [nv, dk, dv]
        outputs.append((state * q[t, :, :, None]).sum(-2))  # [nv, dv]: read after the write
    return torch.stack(outputs).to(v.dtype), state


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., dv] scaled to a root mean square of 1, times weight [dv], then times silu of gate [..., dv]: norm first. Output in x's dtype.

    The weight is plain, also where the model's other norms multiply by 1 + weight. It may be float32 in a 16-bit model; the product then is too.
    """
    wide = wide_dtype(x.dtype)
    u = x.to(wide)  # [..., dv] wide
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)  # [..., dv] wide
    return (weight * u.to(x.dtype) * F.silu(gate.to(wide))).to(x.dtype)  # [..., dv]
