"""Reference. Slow on purpose: dense Qwen3, top to bottom, in plain PyTorch. It defines what the fast engine must compute; nothing in it is tuned.

Run on one request at a time, whole prompt and then token by token, it gives the bits of transformers' eager code in bfloat16 and float32: the order
of operations, the shapes of the products and the places where values are rounded are the same. "Wide" is the dtype of norms, angles and softmax:
float32, or float64 in a float64 model.

Shapes: T tokens of the step, h hidden_size, H query heads, K key-value heads, d head_dim; in a row L queries and S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn import functional as F

from twinfer.config import ModelConfig
from twinfer.engine.flatten import FlatStep
from twinfer.engine.frequencies import inverse_frequencies
from twinfer.reference.cache import KVCache
from twinfer.reference.rope import cos_sin, rotate

Observe = Callable[[str, torch.Tensor], None]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what must not be rounded to `dtype` on the way: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] scaled to a root mean square of 1 over its last dim, in wide, rounded, then times weight [n] in x's dtype."""
    u = x.to(wide_dtype(x.dtype))  # [..., n] wide
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)  # [..., n] wide
    return weight * u.to(x.dtype)  # [..., n]


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys each query may see, [L, S] bool, from places in the context, queries [L] and keys [S]: itself and before, within the window."""
    seen = keys[None, :] <= queries[:, None]  # [L, S]
    if window is not None:
        seen = seen & (keys[None, :] > queries[:, None] - window)  # [L, S]
    return seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one row: q [L, H, d], k and v [S, K, d], seen [L, S] bool -> [L, H, d]. Query head i reads key-value head i // (H / K)."""
    group = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1)  # [H, L, d]
    k = k.transpose(0, 1).repeat_interleave(group, dim=0)  # [H, S, d]
    v = v.transpose(0, 1).repeat_interleave(group, dim=0)  # [H, S, d]
    scores = torch.matmul(q, k.transpose(1, 2)) * scale  # [H, L, S]
    scores = scores.masked_fill(~seen, float("-inf"))  # [H, L, S]
    weights = F.softmax(scores, dim=-1, dtype=wide_dtype(q.dtype)).to(q.dtype)  # [H, L, S]
    return torch.matmul(weights, v).transpose(0, 1)  # [L, H, d]


class Qwen3:
    """The model: a config and its weights by their names in the checkpoint (`Checkpoint.weights` or `random_weights`).

    All weights have one dtype (float64, float32, bfloat16 or float16) and one device; both are the model's. Nothing is copied.

    Memory: a row's attention is computed whole, its scores are not tiled, so a long chunk over a long context is dear: the first term for rows below.
    Beyond weights and cache, `forward` holds at most
        T (b (4 h + 4 (H + K) d + 3 I) + w (3 max(h, H d) + 4 d))
        + max over rows of (H L S (2 b + 2 w) + 3 L S + 2 b d (K P + H S) + 16 (L + P))
    bytes, with b and w the bytes of the model's and of the wide dtype, I intermediate_size, L the row's tokens, P its pages * page_size, and S the
    keys that it reads: its context, or with a sliding window at most L + window - 1. `logits` of n tokens takes b n vocab_size.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        # Of the model, like its weights: 64 numbers that no limit sizes.
        inv_freq, self.rope_factor = inverse_frequencies(config.rope, config.head_dim, wide_dtype(self.dtype))
        self.inv_freq = inv_freq.to(self.device)  # [d / 2] wide

    def forward(self, step: FlatStep, cache: KVCache, observe: Observe | None = None) -> torch.Tensor:
        """Computes every token of the step, at least one, and writes its keys and values into `cache`. Returns hidden [T, h] after the final norm.

        `observe(name, tensor [T, h])` sees the layer boundaries: "embedding", "layers.0" .. (each layer's output), "norm".
        """
        observe = observe or (lambda name, tensor: None)
        token_ids = torch.from_numpy(step.token_ids).to(self.device)  # [T]
        positions = torch.from_numpy(step.positions).to(self.device)  # [T]
        write_slots = torch.from_numpy(step.write_slots).to(self.device)  # [T]
        lengths = np.diff(step.row_indptr).tolist()  # tokens of each row
        cos, sin = cos_sin(positions, self.inv_freq, self.rope_factor, self.dtype)  # [T, d] each

        hidden = F.embedding(token_ids, self.weights["model.embed_tokens.weight"])  # [T, h]
        observe("embedding", hidden)
        for i in range(self.config.num_layers):
            layer = f"model.layers.{i}."
            x = self._norm(hidden, layer + "input_layernorm")  # [T, h]
            q = self._heads(x, layer + "self_attn.q_proj")  # [T, H, d]
            k = self._heads(x, layer + "self_attn.k_proj")  # [T, K, d]
            v = self._heads(x, layer + "self_attn.v_proj")  # [T, K, d]
            q = rotate(self._norm(q, layer + "self_attn.q_norm"), cos, sin)  # [T, H, d]
            k = rotate(self._norm(k, layer + "self_attn.k_norm"), cos, sin)  # [T, K, d]
            cache.write(i, write_slots, k, v)
            rows = torch.split(q, lengths)  # by row, [L, H, d] each
            attended = torch.cat([self._attend_row(i, row, rows[row], step, cache) for row in range(step.num_rows)])  # [T, H, d]
            hidden = hidden + self._linear(attended.flatten(1), layer + "self_attn.o_proj")  # [T, h]

            x = self._norm(hidden, layer + "post_attention_layernorm")  # [T, h]
            gate = F.silu(self._linear(x, layer + "mlp.gate_proj"))  # [T, I]
            up = self._linear(x, layer + "mlp.up_proj")  # [T, I]
            hidden = hidden + self._linear(gate * up, layer + "mlp.down_proj")  # [T, h]
            observe(f"layers.{i}", hidden)
        hidden = self._norm(hidden, "model.norm")  # [T, h]
        observe("norm", hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h], any n rows of what `forward` returned -> [n, vocab_size] in the model's dtype; callers upcast."""
        return self._linear(hidden, "lm_head")

    def _attend_row(self, i: int, row: int, q: torch.Tensor, step: FlatStep, cache: KVCache) -> torch.Tensor:
        """Layer i's attention for one row: its queries q [L, H, d] against the keys that its own page list leads to -> [L, H, d]."""
        start, context, window = int(step.start[row]), int(step.context[row]), self.config.windows[i]
        page_list = step.page_indices[step.page_indptr[row] : step.page_indptr[row + 1]]
        pages = torch.from_numpy(page_list).to(self.device, torch.int64)  # [pages of the row]
        k, v = cache.gather(i, pages, context)  # [context, K, d] each
        # Keys that lie behind the window of the row's first query are seen by nobody.
        first = 0 if window is None else max(0, start - window + 1)
        queries = torch.arange(start, context, device=self.device)  # [L]
        keys = torch.arange(first, context, device=self.device)  # [S]
        seen = visible(queries, keys, window)  # [L, S]
        return attend(q, k[first:], v[first:], seen, self.config.head_dim**-0.5)  # [L, H, d]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[name + ".weight"], self.config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x [T, in] -> [T, out], with the bias where the checkpoint has one."""
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x [T, h] -> [T, heads, d]: a projection, cut into heads."""
        return self._linear(x, name).view(len(x), -1, self.config.head_dim)
