"""Philox words and the noise made from them, against published vectors, numpy and fp32 arithmetic; not the sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.noise import Purpose
from twinfer.reference.philox import exponential_noise, gumbel_noise, philox, uniform_words

from .plain import plain_philox

SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=repeatable())
WORD = st.integers(0, 2**32 - 1)
ONES = 2**32 - 1

# Known answers that Random123 publishes for philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def in_torch(counter: list[int], key: list[int], device: str = "cpu") -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word], device=device) for word in counter)
    k0, k1 = (torch.tensor([word], device=device) for word in key)
    return [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))]


def words_of(seed: int, sample: int, position: int, purpose: Purpose, num_words: int) -> torch.Tensor:
    return uniform_words(np.array([seed], np.uint64), np.array([sample]), np.array([position]), purpose, num_words)[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_known_answers(counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...], device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert in_torch(list(counter), list(key), device) == list(output)


def test_numpys_generator_anchors_the_plain_form() -> None:
    """numpy has the 64-bit width only; what it confirms is the plain form's structure, which the 32-bit width shares."""
    key, counter = [123, 2**64 - 5], [7, 2**64 - 2, 11, 13]
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    words = generator.random_raw(8).tolist()
    # numpy adds one to the counter before each block.
    assert words[:4] == plain_philox([8, *counter[1:]], key, 64)
    assert words[4:] == plain_philox([9, *counter[1:]], key, 64)


@SETTINGS
@given(counter=st.lists(WORD, min_size=4, max_size=4), key=st.lists(WORD, min_size=2, max_size=2))
def test_equals_the_plain_form(counter: list[int], key: list[int]) -> None:
    assert in_torch(counter, key) == plain_philox(counter, key, 32)


@SETTINGS
@given(
    seed=st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)),
    sample=st.integers(0, 1023),
    position=st.integers(0, 2**31 - 1),
    purpose=st.sampled_from(list(Purpose)),
    token=st.integers(0, 300),
    more=st.integers(1, 40),
)
def test_word_of_a_token_follows_the_documented_key_and_counter(
    seed: int, sample: int, position: int, purpose: Purpose, token: int, more: int
) -> None:
    words = words_of(seed, sample, position, purpose, token + more)
    assert words.shape == (token + more,)
    assert words.dtype == torch.int64
    assert int(words[token]) == plain_philox([token // 4, position, sample, int(purpose)], [seed % 2**32, seed // 2**32], 32)[token % 4]


def test_words_do_not_depend_on_how_many_are_asked_for() -> None:
    long = words_of(5, 0, 9, Purpose.DRAW, 1000)
    for count in (0, 1, 3, 4, 5, 999):
        assert torch.equal(words_of(5, 0, 9, Purpose.DRAW, count), long[:count])


def test_seeds_samples_positions_and_purposes_give_unrelated_words() -> None:
    base = (5, 0, 9, Purpose.DRAW)
    others = [(6, 0, 9, Purpose.DRAW), (5 + 2**32, 0, 9, Purpose.DRAW), (5, 1, 9, Purpose.DRAW), (5, 0, 10, Purpose.DRAW)]
    others += [(5, 9, 0, Purpose.DRAW), (5, 0, 9, Purpose.ACCEPT), (5, 0, 9, Purpose.RESAMPLE)]
    words = words_of(*base, 4096)
    for other in others:
        difference = (words ^ words_of(*other, 4096)).numpy()
        flipped = sum(int(((difference >> bit) & 1).sum()) for bit in range(32))
        # 131072 fair bits: mean 65536, standard deviation 181; six of them.
        assert abs(flipped - 65536) < 1086, other


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_words_are_uniform(seed: int) -> None:
    words = torch.cat([words_of(seed, 0, position, Purpose.DRAW, 4096) for position in range(32)])
    for shift in (0, 8, 16, 24):
        counts = ((words >> shift) & 0xFF).bincount(minlength=256).double()
        expected = len(words) / 256
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert float(torch.special.gammaincc(torch.tensor(255 / 2, dtype=torch.float64), statistic / 2)) > 1e-6


def test_noise_is_finite_at_both_ends_and_falls_with_the_word() -> None:
    words = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1])
    exponential, gumbel = exponential_noise(words), gumbel_noise(words)
    assert exponential.isfinite().all()
    assert (exponential > 0).all()
    assert gumbel.isfinite().all()
    assert (gumbel.diff() <= 0).all()
    assert float(gumbel[0]) == pytest.approx(22.8739, abs=1e-3)
    assert float(gumbel[-1]) == pytest.approx(-2.8118, abs=1e-3)
    assert float(gumbel[-1]) == float(gumbel[-2])  # the clamp


def _words_of_every_size() -> np.ndarray:
    random = np.random.default_rng(0)
    edges = [r for power in range(33) for r in (2**power - 2, 2**power - 1, 2**power, 2**power + 1)]
    edges += [2**32 - r for r in edges]
    spread = (2.0 ** random.uniform(0, 32, 100_000)).astype(np.int64)
    words = np.concatenate([np.array(edges), spread, 2**32 - spread, random.integers(0, 2**32, 200_000)])
    return words[(words >= 0) & (words < 2**32)]


def test_fp32_with_the_complement_agrees_to_1e_6() -> None:
    """The form that twinfer.noise gives to an fp32 engine, in numpy's fp32."""
    words = _words_of_every_size()
    scale, half = np.float32(2.0**-32), np.float32(0.5)
    low = -np.log1p(-(words.astype(np.float32) + half) * scale, where=words < 2**31, out=np.zeros(len(words), np.float32))
    complement = ((2**32 - 1 - words).astype(np.float32) + half) * scale
    high = -np.log(np.maximum(complement, np.float32(2.0**-24)))
    got = np.where(words < 2**31, low, high)
    assert got.dtype == np.float32
    want = exponential_noise(torch.from_numpy(words)).numpy()
    assert np.abs(got / want - 1).max() < 1e-6
    assert np.abs(-np.log(got.astype(np.float64)) + np.log(want)).max() < 1e-6


def test_fp32_without_the_complement_does_not_agree() -> None:
    """Why the complement is taken: near 1 an fp32 w has lost the word's low bits."""
    words = _words_of_every_size()
    uniform = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    want = exponential_noise(torch.from_numpy(words)).numpy()
    assert np.abs(-np.log1p(-uniform) / want - 1).max() > 1e-2
