"""The router and the loop over experts against the plain sum over all experts, with ties, with one and with all experts chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.model.tiny import hf_logits
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.layout import from_stored
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.moe import mix, mlp, route, shared_share

from . import tiny
from .driver import run_alone
from .shapes import SPARSE

T, H, E, M = 21, 12, 8, 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_per_token", [1, 2, 3, E])
def test_route(num_per_token: int, normalise: bool) -> None:
    x, weight = drawn(T, H), drawn(E, H, seed=1)
    shares, experts = route(x, weight, num_per_token, normalise)
    assert (shares.shape, experts.shape) == ((T, num_per_token), (T, num_per_token))
    for t in range(T):
        logits = (weight @ x[t]).tolist()
        total = torch.tensor(logits, dtype=x.dtype).exp().sum()
        chosen = sorted(range(E), key=lambda e: -logits[e])[:num_per_token]
        assert experts[t].tolist() == chosen
        expected = torch.tensor([logits[e] for e in chosen], dtype=x.dtype).exp() / total
        assert torch.allclose(shares[t], expected / expected.sum() if normalise else expected, atol=1e-14, rtol=0)
    total = shares.sum(-1)
    assert torch.allclose(total, torch.ones_like(total), atol=1e-14) == (normalise or num_per_token == E)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_per_token", [1, 3, 5, E])
def test_ties_go_to_the_lower_number(num_per_token: int, dtype: torch.dtype) -> None:
    """Experts 1, 4 and 6 tie for the best, all others tie for the rest; more rows or columns than a sort's small case change nothing."""
    for repeat in (1, 40):
        weight = torch.zeros(E * repeat, H, dtype=dtype)
        weight[[1, 4, 6], 0] = 1.0
        shares, experts = route(torch.ones(T * repeat, H, dtype=dtype), weight, num_per_token, True)
        expected = [1, 4, 6, *(e for e in range(E * repeat) if e not in (1, 4, 6))][:num_per_token]
        assert experts.tolist() == [expected] * (T * repeat)
        assert torch.equal(shares, shares[:1].expand_as(shares))


@pytest.mark.parametrize("num_per_token", [1, 3, E])
def test_mix_is_the_sum_over_all_experts(num_per_token: int) -> None:
    x, gate_up, down = drawn(T, H), drawn(E, 2 * M, H, seed=2), drawn(E, H, M, seed=3)
    shares, experts = route(x, drawn(E, H, seed=1), num_per_token, True)
    weights = torch.zeros(T, E, dtype=x.dtype).scatter_(1, experts, shares)  # [T, E], zero where an expert is not chosen
    inner = torch.einsum("th,emh->tem", x, gate_up)
    outputs = torch.einsum("tem,ehm->teh", F.silu(inner[..., :M]) * inner[..., M:], down)
    assert float((mix(x, shares, experts, gate_up, down) - (weights[..., None] * outputs).sum(1)).abs().max()) < 1e-12


def test_one_expert_is_a_dense_feed_forward() -> None:
    x, gate_up, down = drawn(T, H), drawn(1, 2 * M, H, seed=2), drawn(1, H, M, seed=3)
    found = mix(x, *route(x, drawn(1, H, seed=1), 1, False), gate_up, down)
    assert float((found - mlp(x, gate_up[0, :M], gate_up[0, M:], down[0])).abs().max()) < 1e-12


def test_an_unchosen_expert_is_not_computed() -> None:
    """It may even hold NaN."""
    x, gate_up, down = drawn(T, H), drawn(E, 2 * M, H, seed=2), drawn(E, H, M, seed=3)
    gate_up[[0, 7]] = torch.nan
    shares, experts = torch.full((T, 2), 0.5, dtype=x.dtype), torch.tensor([[3, 5]]).expand(T, 2)
    assert mix(x, shares, experts, gate_up, down).isfinite().all()


def test_shared_share_is_one_number_a_token() -> None:
    x, weight = drawn(T, H), drawn(1, H, seed=4)
    assert torch.allclose(shared_share(x, weight), 1 / (1 + (-(x @ weight.T)).exp()))
    assert shared_share(x, weight).shape == (T, 1)


@pytest.mark.parametrize("name", SPARSE)
def test_tied_twins_in_a_model(name: str, tmp_path: Path) -> None:
    """Experts come in pairs, equal in their weights and for the router, and an odd number is chosen: every token has a tie at the border. Whichever
    twin is taken, the numbers are transformers'.
    """
    model = tiny.make(name)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                parameter[1::2] = parameter[::2]
    model.save_pretrained(tmp_path)
    theirs = tiny.load_hf(tmp_path, name, "float64")
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    config = Checkpoint.open(tmp_path).config
    found = run_alone(Hybrid(config, from_stored(config, theirs.state_dict())), tokens, [40])
    assert float((found - hf_logits(theirs, tokens, 40)).abs().max()) < 1e-10
