"""QK norm, rotary embedding and the cache write in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [T, heads, d] scaled to a root mean square of 1 in each head, rounded, times weight [d]; x itself without a weight."""
    if weight is None:
        return x
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d] with dims j and j + d / 2 turned as a pair; cos and sin [T, 1, d]. Two products and a sum, each rounded to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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
    """Norm (per head) and rotary embedding of queries and keys; queries go to `q`, keys and values into the cache.

    qkv          [T, (H + 2 K) d]: H query heads, K key heads, K value heads
    q_weight     [d], or None: queries are not normed; k_weight likewise, and both are None or neither
    positions    [T] int32, in 0 .. P - 1
    write_slots  [T] int64, page * page_size + offset; equal only where all but one may be lost (the padding page)
    rope_table   [P, 2, d]: cos, then sin, of each position, rounded to qkv's dtype (stored in that dtype or in float32)
    q            [T, H, d]
    keys         [pages, page_size, K, d], any strides but of the last dim; what no slot names stays as it is
    values       as keys
    """
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1], keys.shape[2]
    query, key, value = torch.split(qkv.view(num_tokens, -1, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = rope_table[positions.long()].to(qkv.dtype)  # [T, 2, d]
    cos, sin = angles[:, :1], angles[:, 1:]  # [T, 1, d] each
    pages, offsets = write_slots // page_size, write_slots % page_size
    q.copy_(_rotate(_norm(query, q_weight, eps), cos, sin))
    keys[pages, offsets] = _rotate(_norm(key, k_weight, eps), cos, sin)
    values[pages, offsets] = value
