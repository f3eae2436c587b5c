"""QK norm, rotary embedding and the cache write in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, centred: bool) -> torch.Tensor:
    """x [T, heads, d] scaled to a root mean square of 1 in each head, rounded, times weight [d]; x itself without a weight.

    centred  times 1 + weight instead, rounded once
    """
    if weight is None:
        return x
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.to(wide.dtype))).to(x.dtype) if centred else weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d]; of its first r dims, j and j + r / 2 are turned as a pair, the others pass. cos, sin [T, 1, r]. Each product and sum is rounded."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat((turning * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


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
    """Norm (per head) and rotary embedding of queries and keys; queries go to `q`, keys and values into the cache.

    qkv          [T, (H + 2 K) d]: H query heads, K key heads, K value heads; or [T, (2 H + 2 K) d]: behind each query head its gate, which is not read
    q_weight     [d], or None: queries are not normed; k_weight likewise, and both are None or neither
    positions    [T] int32, in 0 .. P - 1
    write_slots  [T] int64, page * page_size + offset; equal only where all but one may be lost (the padding page)
    rope_table   [P, 2, r]: cos, then sin, of each position, rounded to qkv's dtype (stored in that dtype or in float32); the first r <= d dims turn
    q            [T, H, d]
    keys         [pages, page_size, K, d], any strides but of the last dim; what no slot names stays as it is
    values       as keys
    centred      norms multiply by 1 + weight
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    heads = qkv.view(num_tokens, -1, head_dim)
    query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    query = query[:, :: query.shape[1] // num_heads]
    angles = rope_table[positions.long()].to(qkv.dtype)  # [T, 2, r]
    cos, sin = angles[:, :1], angles[:, 1:]  # [T, 1, r] each
    pages, offsets = write_slots // page_size, write_slots % page_size
    q.copy_(_rotate(_norm(query, q_weight, eps, centred), cos, sin))
    keys[pages, offsets] = _rotate(_norm(key, k_weight, eps, centred), cos, sin)
    values[pages, offsets] = value
