"""The gate of 1e-10 against transformers in float64 can fail: one injected fault at a time, each must push a logit over it a thousandfold.

A fault that a prompt computed whole would hide (what is carried between pieces) is seen because the prompt comes in pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.model.tiny import hf_logits
from twinfer.config import ModelConfig
from twinfer.engine import layout
from twinfer.engine.checkpoint import Checkpoint
from twinfer.reference import gdn, hybrid, moe
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.state import StateCache

from . import tiny
from .driver import run_alone
from .shapes import HYBRID, NEW, SPARSE

GATE, RED = 1e-10, 1e-7
TOKENS = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(3)).tolist()
PIECES = [40, 2, 1, 1, 26]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelConfig, dict[str, torch.Tensor], torch.Tensor]]:
    """Of each type: its config, weights as stored, and transformers' logits."""
    found = {}
    for name in NEW:
        path: Path = tiny.write(tmp_path_factory.mktemp(name), name)
        theirs = tiny.load_hf(path, name, "float64")
        found[name] = (Checkpoint.open(path).config, dict(theirs.state_dict()), hf_logits(theirs, TOKENS, len(TOKENS)))
    return found


def replaced(patch: Patch, place: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts `make(what was there)` in its place."""
    patch.setattr(place, name, make(getattr(place, name)))


# Gated DeltaNet.


def no_eps_in_l2norm(patch: Patch) -> None:
    patch.setattr(gdn, "L2_EPS", 0.0)


def l2norm_by_mean(patch: Patch) -> None:
    patch.setattr(gdn, "l2_normalised", lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + gdn.L2_EPS))


def l2norm_clamped(patch: Patch) -> None:
    patch.setattr(gdn, "l2_normalised", lambda x: F.normalize(x, dim=-1, eps=gdn.L2_EPS))


def no_l2norm(patch: Patch) -> None:
    patch.setattr(gdn, "l2_normalised", lambda x: x)


def bias_after_softplus(patch: Patch) -> None:
    patch.setattr(hybrid, "log_decay", lambda a, a_log, dt_bias: -a_log.exp() * (F.softplus(a) + dt_bias.clamp(min=0)))


def decay_without_exp_of_a_log(patch: Patch) -> None:
    patch.setattr(hybrid, "log_decay", lambda a, a_log, dt_bias: -a_log.abs() * F.softplus(a + dt_bias))


def decay_sign(patch: Patch) -> None:
    replaced(patch, hybrid, "log_decay", lambda right: lambda *args: -right(*args))


def beta_is_one(patch: Patch) -> None:
    patch.setattr(hybrid, "write_strength", torch.ones_like)


def beta_without_sigmoid(patch: Patch) -> None:
    patch.setattr(hybrid, "write_strength", lambda b: b)


def a_and_b_swapped(patch: Patch) -> None:
    names = {"in_proj_a": "in_proj_b", "in_proj_b": "in_proj_a"}
    replaced(patch, Hybrid, "_linear", lambda right: lambda self, x, name: right(self, x, name[:-9] + names.get(name[-9:], name[-9:])))


def key_heads_tiled(patch: Patch) -> None:
    def wrong(right: Any) -> Any:
        def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Any:
            group = v.shape[1] // k.shape[1]
            return right(q.repeat(1, group, 1), k.repeat(1, group, 1), v, *rest)

        return recurrence

    replaced(patch, hybrid, "recurrence", wrong)


def queries_and_keys_swapped(patch: Patch) -> None:
    replaced(patch, hybrid, "recurrence", lambda right: lambda q, k, *rest: right(k, q, *rest))


def queries_not_scaled(patch: Patch) -> None:
    def wrong(right: Any) -> Any:
        def recurrence(q: torch.Tensor, *rest: torch.Tensor) -> Any:
            output, state = right(q, *rest)
            return output * q.shape[-1] ** 0.5, state

        return recurrence

    replaced(patch, hybrid, "recurrence", wrong)


def loop(patch: Patch, token: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Another recurrence: `token(state, q, k, v, kept, beta)` gives state and output, all by value head."""

    def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor) -> Any:
        group, outputs = v.shape[1] // k.shape[1], []
        q = gdn.l2_normalised(q).repeat_interleave(group, dim=1) / q.shape[-1] ** 0.5
        k = gdn.l2_normalised(k).repeat_interleave(group, dim=1)
        for t in range(len(v)):
            state, output = token(state, q[t], k[t], v[t], decay[t].exp()[:, None, None], beta[t][:, None])
            outputs.append(output)
        return torch.stack(outputs), state

    patch.setattr(hybrid, "recurrence", recurrence)


def read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (state * key[..., None]).sum(-2)


def right_token(s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor) -> Any:
    s = s * kept
    s = s + k[..., None] * ((v - read(s, k)) * beta)[:, None]
    return s, read(s, q)


def decay_after_the_write(patch: Patch) -> None:
    def token(s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor) -> Any:
        s = (s + k[..., None] * ((v - read(s, k)) * beta)[:, None]) * kept
        return s, read(s, q)

    loop(patch, token)


def delta_against_the_state_before_decay(patch: Patch) -> None:
    def token(s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor) -> Any:
        s = s * kept + k[..., None] * ((v - read(s, k)) * beta)[:, None]
        return s, read(s, q)

    loop(patch, token)


def read_before_the_write(patch: Patch) -> None:
    loop(patch, lambda s, q, k, v, kept, beta: (right_token(s, q, k, v, kept, beta)[0], read(s * kept, q)))


def no_delta(patch: Patch) -> None:
    def token(s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor) -> Any:
        s = s * kept + k[..., None] * (v * beta)[:, None]
        return s, read(s, q)

    loop(patch, token)


def state_narrow_between_pieces(patch: Patch) -> None:
    replaced(patch, StateCache, "write", lambda right: lambda self, layer, slot, history, state: right(self, layer, slot, history, state.float().double()))


def state_not_carried(patch: Patch) -> None:
    replaced(patch, hybrid, "recurrence", lambda right: lambda *args: right(*args[:5], torch.zeros_like(args[5])))


def history_not_carried(patch: Patch) -> None:
    replaced(patch, hybrid, "causal_conv", lambda right: lambda x, weight, history: right(x, weight, torch.zeros_like(history)))


def history_after_the_convolution(patch: Patch) -> None:
    def wrong(right: Any) -> Any:
        def causal_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mixed, kept = right(x, weight, history)
            return mixed, torch.cat((history, mixed))[-len(kept) :]

        return causal_conv

    replaced(patch, hybrid, "causal_conv", wrong)


def history_one_token_old(patch: Patch) -> None:
    replaced(patch, hybrid, "causal_conv", lambda right: lambda x, w, history: (right(x, w, history)[0], torch.cat((history, x))[len(x) - 1 : -1]))


def history_cleared_by_a_piece_shorter_than_it(patch: Patch) -> None:
    def wrong(right: Any) -> Any:
        def causal_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mixed, kept = right(x, weight, history)
            return mixed, kept if len(x) >= len(kept) else torch.cat((torch.zeros_like(history), x))[-len(kept) :]

        return causal_conv

    replaced(patch, hybrid, "causal_conv", wrong)


def taps_reversed(patch: Patch) -> None:
    replaced(patch, hybrid, "causal_conv", lambda right: lambda x, weight, history: right(x, weight.flip(-1), history))


def no_silu_after_the_convolution(patch: Patch) -> None:
    def causal_conv(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat((history, x))
        return F.conv1d(seen.T[None], weight, groups=len(weight))[0].T, seen[len(x) :]

    patch.setattr(hybrid, "causal_conv", causal_conv)


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gate_before_norm(patch: Patch) -> None:
    patch.setattr(hybrid, "gated_rms_norm", lambda x, gate, weight, eps: weight * normed(x * F.silu(gate), eps))


def sigmoid_for_silu_in_the_gated_norm(patch: Patch) -> None:
    patch.setattr(hybrid, "gated_rms_norm", lambda x, gate, weight, eps: weight * normed(x, eps) * torch.sigmoid(gate))


def one_plus_weight_in_the_gated_norm(patch: Patch) -> None:
    replaced(patch, hybrid, "gated_rms_norm", lambda right: lambda x, gate, weight, eps: right(x, gate, 1 + weight, eps))


# Attention and norms.


def norms_by_weight_alone(patch: Patch) -> None:
    patch.setattr(hybrid, "centred_rms_norm", hybrid.rms_norm)


def norms_by_one_plus_weight(patch: Patch) -> None:
    patch.setattr(hybrid, "rms_norm", hybrid.centred_rms_norm)


def rotary_over_the_whole_head(patch: Patch) -> None:
    patch.setattr(ModelConfig, "rotary_dim", property(lambda self: self.head_dim))


def rotary_at_the_end_of_the_head(patch: Patch) -> None:
    replaced(
        patch, hybrid, "rotate_first", lambda right: lambda x, cos, sin: right(x.roll(cos.shape[-1], -1), cos, sin).roll(-cos.shape[-1], -1)
    )


def gate_before_query(patch: Patch) -> None:
    replaced(patch, hybrid, "query_and_gate", lambda right: lambda *args: right(*args)[::-1])


def all_queries_then_all_gates(patch: Patch) -> None:
    patch.setattr(hybrid, "query_and_gate", lambda x, d: x.view(len(x), 2, -1, d).unbind(1))


def no_gate_on_attention(patch: Patch) -> None:
    replaced(patch, hybrid, "query_and_gate", lambda right: lambda *args: (right(*args)[0], torch.full_like(right(*args)[1], 1e3)))


def gate_normed(patch: Patch) -> None:
    """The gate goes through the query's norm."""
    replaced(patch, hybrid, "query_and_gate", lambda right: lambda *args: (right(*args)[0], normed(right(*args)[1], 1e-6)))


# Experts.


def router_not_normalised_after_top_k(patch: Patch) -> None:
    replaced(patch, hybrid, "route", lambda right: lambda x, weight, k, normalise: right(x, weight, k, False))


def router_by_sigmoid(patch: Patch) -> None:
    def route(x: torch.Tensor, weight: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        shares, experts = torch.sort(torch.sigmoid(F.linear(x, weight)), dim=-1, descending=True)
        return shares[:, :k] / shares[:, :k].sum(-1, keepdim=True), experts[:, :k]

    patch.setattr(hybrid, "route", route)


def one_expert_too_few(patch: Patch) -> None:
    replaced(patch, hybrid, "route", lambda right: lambda x, weight, k, normalise: right(x, weight, k - 1, normalise))


def share_on_the_input_of_an_expert(patch: Patch) -> None:
    def mix(x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(shares[:, :1])
        return sum((moe.mix(x * shares[:, i, None], ones, experts[:, i, None], gate_up, down) for i in range(shares.shape[1])), torch.zeros_like(x))

    patch.setattr(hybrid, "mix", mix)


def up_before_gate_in_experts(patch: Patch) -> None:
    replaced(patch, hybrid, "mix", lambda right: lambda x, s, e, gate_up, down: right(x, s, e, gate_up.roll(down.shape[-1], 1), down))


def shared_gate_dropped(patch: Patch) -> None:
    patch.setattr(hybrid, "shared_share", lambda x, weight: torch.ones_like(x[:, :1]))


def shared_expert_dropped(patch: Patch) -> None:
    patch.setattr(hybrid, "shared_share", lambda x, weight: torch.zeros_like(x[:, :1]))


# Layout.


def joint_projections_cut_in_the_middle(patch: Patch) -> None:
    def split_ba(shape: Any, module: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        b, a = tensor.chunk(2)
        return {module + ".in_proj_b.weight": b, module + ".in_proj_a.weight": a}

    patch.setattr(layout, "_split_ba", split_ba)


def joint_projections_not_interleaved(patch: Patch) -> None:
    def split_qkvz(shape: Any, module: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {module + ".in_proj_qkv.weight": tensor[: shape.conv_dim], module + ".in_proj_z.weight": tensor[shape.conv_dim :]}

    patch.setattr(layout, "_split_qkvz", split_qkvz)


SHARED = ("qwen3_next", "qwen3_5_moe")
FAULTS: list[tuple[Callable[[Patch], None], tuple[str, ...]]] = [
    *((fault, HYBRID) for fault in (no_eps_in_l2norm, l2norm_by_mean, l2norm_clamped, no_l2norm)),
    *((fault, HYBRID) for fault in (bias_after_softplus, decay_without_exp_of_a_log, decay_sign, beta_is_one, beta_without_sigmoid, a_and_b_swapped)),
    *((fault, HYBRID) for fault in (key_heads_tiled, queries_and_keys_swapped, queries_not_scaled)),
    *((fault, HYBRID) for fault in (decay_after_the_write, delta_against_the_state_before_decay, read_before_the_write, no_delta)),
    *((fault, HYBRID) for fault in (state_narrow_between_pieces, state_not_carried, history_not_carried, history_after_the_convolution)),
    *((fault, HYBRID) for fault in (history_one_token_old, history_cleared_by_a_piece_shorter_than_it, taps_reversed, no_silu_after_the_convolution)),
    *((fault, HYBRID) for fault in (gate_before_norm, sigmoid_for_silu_in_the_gated_norm, one_plus_weight_in_the_gated_norm)),
    *((fault, HYBRID) for fault in (norms_by_weight_alone, rotary_over_the_whole_head, rotary_at_the_end_of_the_head)),
    *((fault, HYBRID) for fault in (gate_before_query, all_queries_then_all_gates, no_gate_on_attention, gate_normed)),
    (norms_by_one_plus_weight, ("qwen3_moe",)),
    *((fault, SPARSE) for fault in (router_not_normalised_after_top_k, router_by_sigmoid, one_expert_too_few)),
    *((fault, SPARSE) for fault in (share_on_the_input_of_an_expert, up_before_gate_in_experts)),
    *((fault, SHARED) for fault in (shared_gate_dropped, shared_expert_dropped)),
    *((fault, ("qwen3_next",)) for fault in (joint_projections_cut_in_the_middle, joint_projections_not_interleaved)),
]


def difference(case: tuple[ModelConfig, dict[str, torch.Tensor], torch.Tensor]) -> float:
    config, stored, expected = case
    found = run_alone(Hybrid(config, layout.from_stored(config, stored)), TOKENS, PIECES)
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", NEW)
def test_no_fault(name: str, cases: dict[str, Any], monkeypatch: Patch) -> None:
    assert difference(cases[name]) <= GATE
    loop(monkeypatch, right_token)  # what the wrong ones are variations of
    assert difference(cases[name]) <= GATE


@pytest.mark.parametrize(("fault", "names"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_fault(fault: Callable[[Patch], None], names: tuple[str, ...], cases: dict[str, Any], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    for name in names:
        assert difference(cases[name]) > RED, name  # a NaN would fail this: each fault here must be visible as a number


def test_always_normalised(cases: dict[str, Any], tmp_path: Path) -> None:
    """The other way round: a model that does not normalise, computed as if it did."""
    path = tiny.write(tmp_path, "qwen3_moe", {"norm_topk_prob": False})
    theirs = tiny.load_hf(path, "qwen3_moe", "float64")
    config = Checkpoint.open(path).config
    expected, stored = hf_logits(theirs, TOKENS, len(TOKENS)), dict(theirs.state_dict())
    assert difference((config, stored, expected)) <= GATE
    assert config.experts is not None
    wrong = dataclasses.replace(config, experts=dataclasses.replace(config.experts, normalise=True))
    assert difference((wrong, stored, expected)) > RED
