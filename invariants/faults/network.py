"""Faults of the model's arithmetic, in the reference: small enough to read well, large enough for the float32 gate."""

from __future__ import annotations

from twinfer.invariants.faults.fault import Fault
from twinfer.invariants.faults.switch import edited

_GITHUB = "https://github.com/"
_QWEN3 = "twinfer.reference.qwen3:"


def _fault(name: str, what: str, place: str, old: str, new: str, link: str = "") -> Fault:
    return Fault(name, what, "model", ("transformers",), edited(place, old, new), _GITHUB + link if link else "")


FAULTS: tuple[Fault, ...] = (
    # All positions moved alike would change nothing: rope is relative. The fault is a decode step that disagrees with the prefill before it.
    _fault("rope one ahead in decode", "A decode step turns its query and key as if it stood one place further.",
           _QWEN3 + "Qwen3.forward", "torch.from_numpy(step.positions)", "torch.from_numpy(step.positions + (step.num_tokens == 1))"),
    _fault("rope pairs interleaved", "Dims are turned with their neighbours, not with the other half's.",
           "twinfer.reference.rope:rotate",
           "    return", "    return x * cos[:, None] + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin[:, None]\n    return"),
    _fault("epsilon ten times as large", "Norms of small vectors are damped.",
           _QWEN3 + "Qwen3._norm", "self.config.rms_norm_eps", "10 * self.config.rms_norm_eps"),
    _fault("scale two percent up", "Attention is a little too sharp.",
           _QWEN3 + "Qwen3._attend_row", "self.config.head_dim**-0.5", "1.02 * self.config.head_dim**-0.5"),
    _fault("no key norm in one layer", "One layer's keys are not normed.", _QWEN3 + "Qwen3._norm",
           "return rms_norm", "return x if name == \"model.layers.1.self_attn.k_norm\" else rms_norm"),
    _fault("mask shows the next token", "Prefill sees one token of the future.",
           _QWEN3 + "visible", "keys[None, :] <= queries[:, None]", "keys[None, :] <= queries[:, None] + 1"),
    _fault("mask hides the token itself", "A query does not see its own key.", _QWEN3 + "visible",
           "keys[None, :] <= queries[:, None]", "(keys[None, :] < queries[:, None]) | ((queries[:, None] == 0) & (keys[None, :] == 0))"),
    _fault("causal mask from the top left", "Queries at the end of a context see as few keys as those at its beginning.", _QWEN3 + "Qwen3._attend_row",
           "queries = torch.arange(start, context, device=self.device)", "queries = torch.arange(0, context - start, device=self.device)",
           "gittensor-ai-lab/sparkinfer/issues/3"),
    _fault("oldest key dropped", "Each query misses the first key that it should see.", _QWEN3 + "attend", "group = ",
           "oldest = seen.int().argmax(dim=1)\n    lonely = seen.sum(dim=1) == 1\n    seen = seen.clone()\n"
           "    seen[torch.arange(len(seen))[~lonely], oldest[~lonely]] = False\n    group = "),
    _fault("oldest key dropped in decode", "A decode step misses one key that prefill saw.", _QWEN3 + "attend", "group = ",
           "drop = int(q.shape[0] == 1 and k.shape[0] > 1)\n    k, v, seen = k[drop:], v[drop:], seen[:, drop:]\n    group = "),
    _fault("neighbour's slot read", "The last key but one is read from the slot beside it.", "twinfer.reference.cache:KVCache.gather", "    return k, v",
           "    if context > 2:\n        k[-2], v[-2] = k[-3].clone(), v[-3].clone()\n    return k, v"),
    _fault("gate and up swapped", "The wrong half of the MLP goes through silu.", _QWEN3 + "Qwen3._linear", "    return",
           "    name = name.replace(\"gate_proj\", \"other\").replace(\"up_proj\", \"gate_proj\").replace(\"other\", \"up_proj\")\n    return"),
    _fault("norm weights plus one", "Another family's convention is applied to this one's norms.",
           _QWEN3 + "rms_norm", "return weight *", "return (1 + weight) *",
           "Blaizzy/mlx-vlm/issues/1548"),
    _fault("key heads in another order", "Query head i reads key head i mod K instead of i // (H / K).", _QWEN3 + "attend",
           "k = k.transpose(0, 1).repeat_interleave(group, dim=0)", "k = k.transpose(0, 1).repeat(group, 1, 1)", "ggml-org/llama.cpp/pull/21732"),
    _fault("window one too wide", "A sliding window shows one key more.", _QWEN3 + "visible", "queries[:, None] - window", "queries[:, None] - window - 1"),
)  # fmt: skip
