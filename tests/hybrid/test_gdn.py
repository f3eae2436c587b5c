"""The parts of Gated DeltaNet against their formulas written another way: the recurrence against its chunked form, the convolution against a sum of taps."""

from __future__ import annotations

import math

import pytest
import torch

from twinfer.reference.gdn import causal_conv, gated_rms_norm, l2_normalised, log_decay, recurrence, write_strength

NK, NV, DK, DV, K, C = 2, 6, 8, 5, 4, 7


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta of `recurrence`."""
    q, k, v = drawn(num_tokens, NK, DK, seed=1), drawn(num_tokens, NK, DK, seed=2), drawn(num_tokens, NV, DV, seed=3)
    return q, k, v, -drawn(num_tokens, NV, seed=4).exp() * 0.1, drawn(num_tokens, NV, seed=5).sigmoid()


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk at once, one head after another (model specification, 3.4): a triangular system instead of a loop over tokens."""
    outputs, states = torch.empty_like(v), []
    for j in range(v.shape[1]):
        key, query = (x[:, j // (v.shape[1] // k.shape[1])] for x in (k, q))
        key, query = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (key, query))
        query = query / math.sqrt(query.shape[-1])
        total = decay[:, j].cumsum(0)  # [T]
        between = (total[:, None] - total[None, :]).exp().tril()  # [T, T]
        system = torch.eye(len(v), dtype=v.dtype) + (beta[:, j, None] * (key @ key.T) * between).tril(-1)
        wanted = beta[:, j, None] * (v[:, j] - total.exp()[:, None] * (key @ state[j]))
        new = torch.linalg.solve_triangular(system, wanted, upper=False)
        outputs[:, j] = total.exp()[:, None] * (query @ state[j]) + ((query @ key.T) * between) @ new
        states.append(total[-1].exp() * state[j] + (key * (total[-1] - total).exp()[:, None]).T @ new)
    return outputs, torch.stack(states)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 63, 64, 65])
def test_recurrence_is_its_chunked_form(num_tokens: int) -> None:
    state = drawn(NV, DK, DV, seed=6)
    found, expected = recurrence(*inputs(num_tokens), state), chunked(*inputs(num_tokens), state)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < 1e-12


def test_recurrence_carries_its_state() -> None:
    whole, end = recurrence(*inputs(65), torch.zeros(NV, DK, DV, dtype=torch.float64))
    for cut in (1, 2, 3, 63, 64):
        first, state = recurrence(*(x[:cut] for x in inputs(65)), torch.zeros(NV, DK, DV, dtype=torch.float64))
        second, state = recurrence(*(x[cut:] for x in inputs(65)), state)
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(state, end)


def test_what_was_written_with_full_strength_is_read_back() -> None:
    """beta = 1, no decay, keys at right angles: each key recalls its last value."""
    keys = torch.eye(DK, dtype=torch.float64)[[0, 1, 2, 0]][:, None]  # [4, 1, DK]: the last overwrites the first
    values = drawn(4, 1, DV)
    ones, none = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    _, state = recurrence(keys, keys, values, none, ones, torch.zeros(1, DK, DV, dtype=torch.float64))
    assert torch.allclose(state[0, :3], values[[3, 1, 2], 0], atol=1e-5, rtol=0)  # l2's eps of 1e-6
    assert not state[0, 3:].any()


def test_padding_changes_nothing() -> None:
    """Tokens of zeros with beta 0 and no decay, as a chunk's padding, leave the state as it was."""
    _, state = recurrence(*inputs(5), torch.zeros(NV, DK, DV, dtype=torch.float64))
    padded = [torch.cat((x, torch.zeros_like(x[:3]))) for x in inputs(5)]
    output, after = recurrence(*padded, torch.zeros(NV, DK, DV, dtype=torch.float64))
    assert torch.equal(after, state)
    assert not output[5:].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_convolution_is_a_sum_of_taps(num_tokens: int) -> None:
    x, weight, history = drawn(num_tokens, C, seed=1), drawn(C, 1, K, seed=2), drawn(K - 1, C, seed=3)
    seen = torch.cat((history, x))
    taps = torch.stack([sum((weight[:, 0, i] * seen[t + i] for i in range(K)), torch.zeros(C, dtype=x.dtype)) for t in range(num_tokens)])
    found, kept = causal_conv(x, weight, history)
    assert float((found - taps * taps.sigmoid()).abs().max()) < 1e-14
    assert torch.equal(kept, seen[-(K - 1) :])  # before the convolution and silu; older rows move up


def test_gates() -> None:
    a, a_log, dt_bias = drawn(3, NV, seed=1), drawn(NV, seed=2), drawn(NV, seed=3)
    a[0, 0] = 50.0  # softplus is the identity beyond 20
    found = log_decay(a, a_log, dt_bias)
    assert float((found + a_log.exp() * (1 + (a + dt_bias).exp()).log()).abs().max()) < 1e-12
    assert (found <= 0).all()
    assert float((write_strength(a) - 1 / (1 + (-a).exp())).abs().max()) < 1e-15
    assert log_decay(a.bfloat16(), a_log.bfloat16(), dt_bias.bfloat16()).dtype == torch.float32
    assert write_strength(a.bfloat16()).dtype == torch.bfloat16


def test_l2_of_nothing_is_nothing() -> None:
    x = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float64)[:, None].expand(3, DK)
    length = l2_normalised(x).norm(dim=-1)
    assert length[0] == 0  # padding: no division by zero
    assert length[1] == pytest.approx(math.sqrt(8e-8 / (8e-8 + 1e-6)), abs=1e-12)  # eps is inside the root and added to a sum, not to a mean
    assert length[2] == pytest.approx(1, abs=1e-6)


def test_norm_comes_before_its_gate() -> None:
    x, gate, weight = drawn(4, NV, DV, seed=1), drawn(4, NV, DV, seed=2), drawn(DV, seed=3)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight * gate / (1 + (-gate).exp())
    assert float((gated_rms_norm(x, gate, weight, 1e-3) - expected).abs().max()) < 1e-14


def test_a_weight_that_stayed_float32() -> None:
    """In a 16-bit model the product with it is float32 too, and rounded once."""
    x, gate, weight = drawn(64, DV, seed=1).bfloat16(), drawn(64, DV, seed=2).bfloat16(), drawn(DV, seed=3).float()
    u = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = (weight * u.bfloat16().float() * torch.nn.functional.silu(gate.float())).bfloat16()
    found = gated_rms_norm(x, gate, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert not torch.equal(found, gated_rms_norm(x, gate, weight.bfloat16(), 1e-6))
