"""Reference. Slow on purpose: Qwen3's later types, top to bottom, in plain PyTorch: qwen3_moe, qwen3_next, qwen3_5 and qwen3_5_moe.

What they add to dense Qwen3 (`qwen3.py`), each where the config says so: Gated DeltaNet instead of attention in most layers (`gdn.py`); a gate on the
output of attention; rope on a part of each head; norms that multiply by 1 + weight; a choice among experts as feed forward (`moe.py`).

As there, "wide" is float32, or float64 in a float64 model. On one request at a time, products, roundings and their order are those of transformers'
eager code; in a Gated DeltaNet layer those of its code for one token at a time.

Shapes: T tokens of the step, h hidden_size, H query heads, K key-value heads, d head_dim; in a row L tokens and S keys; for Gated DeltaNet as in `gdn.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from twinfer.config import ModelConfig
from twinfer.engine.flatten import FlatStep
from twinfer.engine.frequencies import inverse_frequencies
from twinfer.reference.cache import KVCache
from twinfer.reference.gdn import causal_conv, gated_rms_norm, log_decay, recurrence, write_strength
from twinfer.reference.moe import mix, mlp, route, shared_share
from twinfer.reference.qwen3 import Observe, attend, rms_norm, visible, wide_dtype
from twinfer.reference.rope import cos_sin, rotate
from twinfer.reference.state import StateCache


def centred_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] scaled to a root mean square of 1 over its last dim, times 1 + weight [n], all in wide and rounded once to x's dtype."""
    u = x.to(wide_dtype(x.dtype))  # [..., n] wide
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)  # [..., n] wide
    return (u * (1.0 + weight.to(u.dtype))).to(x.dtype)  # [..., n]


def rotate_first(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, d] with the first dims of each head turned, as many as cos and sin [T, rotary dims] have; the others pass through."""
    turned = rotate(x[..., : cos.shape[-1]], cos, sin)  # [T, heads, rotary dims]
    return torch.cat((turned, x[..., cos.shape[-1] :]), dim=-1)  # [T, heads, d]


def query_and_gate(projected: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What q_proj gives with an output gate, [T, H 2 d] -> query and gate, [T, H, d] each: in every head its query first, then its gate."""
    query, gate = projected.view(len(projected), -1, 2, head_dim).unbind(2)
    return query, gate


class Hybrid:
    """The model: a config and its weights in the form of `expected_tensors` (from `Checkpoint.weights` or `random_weights`).

    All weights have one dtype (float64, float32, bfloat16 or float16) and one device, both the model's; those that a file keeps in float32
    (`tensors.KEPT_WIDE`) may stay so in a 16-bit model.

    Memory: as in `Qwen3`, a row's attention is computed whole. Beyond weights, cache and states, `forward` holds at most
        T (b (4 h + 2 R) + w (3 h + 4 R)) + the largest of
            attention   T (b (9 H + 6 K) d + 3 w H d)
                        + max over rows of (H L S (2 b + 2 w) + 3 L S + 2 b d (K P + H S) + 16 (L + P))
            GDN         T (b (5 C + 4 nv dv) + w nv (5 dk + 4 dv + 4)) + 5 w nv dk dv + b taps C
            experts     T (E (b + 3 w + 8) + b (4 h + 5 m + 3 s) + 40 k)
            dense       T b 3 I
    bytes, with b and w the bytes of the model's and of the wide dtype, R rotary dims, L the row's tokens, P its pages * page_size, S the keys that it
    reads, and of E experts of width m and one shared of width s each token going through k. `logits` of n tokens takes b n vocab_size.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        embedding = weights["model.embed_tokens.weight"]
        self.dtype, self.device = embedding.dtype, embedding.device
        inv_freq, self.rope_factor = inverse_frequencies(config.rope, config.rotary_dim, wide_dtype(self.dtype))
        self.inv_freq = inv_freq.to(self.device)  # [rotary dims / 2] wide
        self.norm = centred_rms_norm if config.centred_norms else rms_norm

    def forward(self, step: FlatStep, cache: KVCache, states: StateCache, state_slots: Sequence[int], observe: Observe | None = None) -> torch.Tensor:
        """Computes every token of the step, at least one. Returns hidden [T, h] after the final norm.

        cache        keys and values, one tensor a layer of attention (counted among such layers alone); those of the step are written into it
        states       histories and states, one tensor a layer of Gated DeltaNet; each row's are read, and written as they are behind its last token
        state_slots  [num_rows]: each row's slot, all different; not read by a model without such layers
        observe      called as observe(name, tensor [T, h]) with "embedding", "layers.0" .. (each layer's output), "norm"
        """
        observe = observe or (lambda name, tensor: None)
        token_ids = torch.from_numpy(step.token_ids).to(self.device)  # [T]
        positions = torch.from_numpy(step.positions).to(self.device)  # [T]
        cos, sin = cos_sin(positions, self.inv_freq, self.rope_factor, self.dtype)  # [T, rotary dims] each

        hidden = F.embedding(token_ids, self.weights["model.embed_tokens.weight"])  # [T, h]
        observe("embedding", hidden)
        num_attention, num_gdn = 0, 0  # layers of each kind so far
        for i in range(self.config.num_layers):
            layer = f"model.layers.{i}."
            x = self._norm(hidden, layer + "input_layernorm")  # [T, h]
            if self.config.has_gdn(i):
                mixed = self._gdn(layer + "linear_attn.", x, step, states, num_gdn, state_slots)  # [T, h]
                num_gdn += 1
            else:
                mixed = self._attention(layer + "self_attn.", x, cos, sin, step, cache, num_attention, self.config.windows[i])  # [T, h]
                num_attention += 1
            hidden = hidden + mixed  # [T, h]

            x = self._norm(hidden, layer + "post_attention_layernorm")  # [T, h]
            feed_forward = self._experts(layer + "mlp.", x) if self.config.has_experts(i) else self._mlp(layer + "mlp.", x)  # [T, h]
            hidden = hidden + feed_forward  # [T, h]
            observe(f"layers.{i}", hidden)
        hidden = self._norm(hidden, "model.norm")  # [T, h]
        observe("norm", hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h], any n rows of what `forward` returned -> [n, vocab_size] in the model's dtype; callers upcast."""
        return self._linear(hidden, "lm_head")

    def _attention(
        self, at: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: FlatStep, cache: KVCache, place: int, window: int | None
    ) -> torch.Tensor:
        """The attention layer whose weights are at `at` and whose cache is number `place`: x [T, h] -> [T, h]."""
        d = self.config.head_dim
        q = self._linear(x, at + "q_proj")  # [T, H d], or [T, H 2 d] with a gate
        gate = None
        if self.config.attention_gate:
            q, gate = query_and_gate(q, d)  # [T, H, d] each
        q = self._norm(q.reshape(len(x), -1, d), at + "q_norm")  # [T, H, d]
        k = self._norm(self._linear(x, at + "k_proj").view(len(x), -1, d), at + "k_norm")  # [T, K, d]
        v = self._linear(x, at + "v_proj").view(len(x), -1, d)  # [T, K, d]
        q, k = rotate_first(q, cos, sin), rotate_first(k, cos, sin)  # [T, H, d], [T, K, d]
        cache.write(place, torch.from_numpy(step.write_slots).to(self.device), k, v)
        rows = torch.split(q, np.diff(step.row_indptr).tolist())  # by row, [L, H, d] each
        attended = torch.cat([self._attend_row(rows[row], row, step, cache, place, window) for row in range(step.num_rows)])  # [T, H, d]
        if gate is not None:
            attended = attended * torch.sigmoid(gate)  # [T, H, d]
        return self._linear(attended.flatten(1), at + "o_proj")  # [T, h]

    def _attend_row(self, q: torch.Tensor, row: int, step: FlatStep, cache: KVCache, place: int, window: int | None) -> torch.Tensor:
        """Attention for one row: its queries q [L, H, d] against the keys that its own page list leads to in cache number `place` -> [L, H, d]."""
        start, context = int(step.start[row]), int(step.context[row])
        page_list = step.page_indices[step.page_indptr[row] : step.page_indptr[row + 1]]
        k, v = cache.gather(place, torch.from_numpy(page_list).to(self.device, torch.int64), context)  # [context, K, d] each
        first = 0 if window is None else max(0, start - window + 1)  # keys before it are seen by nobody
        queries = torch.arange(start, context, device=self.device)  # [L]
        keys = torch.arange(first, context, device=self.device)  # [S]
        return attend(q, k[first:], v[first:], visible(queries, keys, window), self.config.head_dim**-0.5)  # [L, H, d]

    def _gdn(self, at: str, x: torch.Tensor, step: FlatStep, states: StateCache, place: int, state_slots: Sequence[int]) -> torch.Tensor:
        """The Gated DeltaNet layer whose weights are at `at` and whose states are number `place`: x [T, h] -> [T, h]."""
        gdn = self.config.gdn
        assert gdn is not None, "a layer of it"
        qkv = self._linear(x, at + "in_proj_qkv")  # [T, C]
        z = self._linear(x, at + "in_proj_z").view(len(x), gdn.num_value_heads, -1)  # [T, nv, dv]
        decay = log_decay(self._linear(x, at + "in_proj_a"), self.weights[at + "A_log"], self.weights[at + "dt_bias"])  # [T, nv] wide
        beta = write_strength(self._linear(x, at + "in_proj_b"))  # [T, nv]
        outputs = []
        for row, slot in enumerate(state_slots):
            here = slice(int(step.row_indptr[row]), int(step.row_indptr[row + 1]))
            history, state = states.read(place, slot, int(step.start[row]))
            mixed, history = causal_conv(qkv[here], self.weights[at + "conv1d.weight"], history)  # [L, C]
            q, k, v = torch.split(mixed, [gdn.key_dim, gdn.key_dim, gdn.value_dim], dim=-1)
            q, k = (part.view(len(part), gdn.num_key_heads, -1) for part in (q, k))  # [L, nk, dk] each
            v = v.view(len(v), gdn.num_value_heads, -1)  # [L, nv, dv]
            output, state = recurrence(q, k, v, decay[here], beta[here], state)  # [L, nv, dv]
            states.write(place, slot, history, state)
            outputs.append(output)
        normed = gated_rms_norm(torch.cat(outputs), z, self.weights[at + "norm.weight"], self.config.rms_norm_eps)  # [T, nv, dv]
        return self._linear(normed.flatten(1), at + "out_proj")  # [T, h]

    def _experts(self, at: str, x: torch.Tensor) -> torch.Tensor:
        """The choice among experts whose weights are at `at`: x [T, h] -> [T, h]."""
        experts = self.config.experts
        assert experts is not None, "a layer with them"
        shares, chosen = route(x, self.weights[at + "gate.weight"], experts.num_per_token, experts.normalise)  # [T, k] each
        mixed = mix(x, shares, chosen, self.weights[at + "experts.gate_up_proj"], self.weights[at + "experts.down_proj"])  # [T, h]
        if experts.shared_intermediate_size is not None:
            mixed = mixed + shared_share(x, self.weights[at + "shared_expert_gate.weight"]) * self._mlp(at + "shared_expert.", x)  # [T, h]
        return mixed

    def _mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return mlp(x, *(self.weights[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down")))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.norm(x, self.weights[name + ".weight"], self.config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x [n, in] -> [n, out], with the bias where the checkpoint has one."""
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
