"""The choice among experts beyond its fixed cases: ties, what is not a number, the reference's choice, and lists that every way of making them agrees on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from tests.kernels.guard import same_bits
from tests.kernels.test_operations import DEVICE, DTYPES, label
from twinfer.invariants.faults.switch import edited
from twinfer.kernels.experts.tiles import BOUNDS, LEAST_ROWS, tiling_for
from twinfer.kernels.router import kernel, plain
from twinfer.kernels.router.operation import random_experts, unlisted
from twinfer.reference import moe


def routed(logits: torch.Tensor, k: int, normalise: bool = True, token_row: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares, experts) [T, k] by the kernel."""
    shares = torch.full((len(logits), k), torch.nan, dtype=logits.dtype, device=DEVICE)
    experts = torch.full((len(logits), k), -7, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(len(logits), dtype=torch.int32, device=DEVICE) if token_row is None else token_row
    kernel.route(logits, rows, shares, experts, normalise)
    return shares, experts


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_of_experts_that_tie_the_lower_numbers_are_chosen_in_ascending_order(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 9, dtype=dtype, device=DEVICE)
    logits[1, 6] = 1.0
    logits[2, [2, 5, 8]] = 1.0
    logits[3] = -torch.arange(9)  # the most probable first
    shares, experts = routed(logits, 3)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 6], [2, 5, 8], [0, 1, 2]]
    assert torch.equal(shares[0], shares[2])
    assert shares[1].argmax() == 2, "shares go with their experts"


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_the_choice_is_the_references(dtype: torch.dtype) -> None:
    """Logits on a coarse grid, so that both meet ties, and columns of a wider product as the engine has them."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    wide = torch.randint(-20, 20, (12, 80), generator=generator, device=DEVICE).to(dtype) / 8
    logits = wide[:, :60]
    assert not logits.is_contiguous()
    for k, normalise in ((1, True), (8, True), (16, False), (60, True)):
        shares, experts = routed(logits, k, normalise)
        want_shares, want = moe.route(logits, torch.eye(60, dtype=dtype, device=DEVICE), k, normalise)
        order = want.argsort(-1)
        assert torch.equal(experts.long(), want.gather(1, order)), k
        assert torch.allclose(shares, want_shares.gather(1, order), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0), k


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_whatever_the_logits_are_experts_are_distinct_and_there(value: float, k: int) -> None:
    logits = torch.randn(4, 7, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    clean = routed(logits, k)
    logits[1, 3] = value
    logits[2] = value
    shares, experts = routed(logits, k)
    for chosen in experts.tolist():
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(7))
    for i in (0, 3):
        assert same_bits(shares[i], clean[0][i]) and same_bits(experts[i], clean[1][i]), "another token's logits show"
    broken = shares.isnan().all(1).tolist()
    assert broken == [False, value != -torch.inf, True, False], "a token that has no probabilities must show it"


def test_padding_gets_no_expert() -> None:
    """Whatever its logits hold; and its neighbours have what they have without it."""
    logits = torch.randn(5, 20, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    without = routed(logits, 4)
    logits[2] = torch.nan
    shares, experts = routed(logits, 4, token_row=torch.tensor([0, 1, -1, 0, 5], dtype=torch.int32, device=DEVICE))
    assert experts[2].tolist() == [-1] * 4 and not shares[2].any()
    live = [0, 1, 3, 4]
    assert same_bits(shares[live], without[0][live]) and same_bits(experts[live], without[1][live])


def listed(experts: torch.Tensor, num_experts: int, rows: int, how: str) -> dict[str, torch.Tensor]:
    lists = unlisted(experts.numel(), num_experts, rows, experts.device)
    {"few": kernel.launch_few, "many": kernel.launch_many, "plain": plain.group}[how](experts, **lists, rows=rows)
    return lists


@st.composite
def choices(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """(experts [T, k], E, rows): crowded or spread, with padding."""
    num_experts = draw(st.integers(1, 40))
    k = draw(st.integers(1, min(16, num_experts)))
    num_tokens = draw(st.integers(1, 130 // k + 1))
    padding = draw(st.lists(st.integers(0, num_tokens - 1), unique=True)) if draw(st.booleans()) else []
    case = {"T": num_tokens, "E": num_experts, "k": k, "padding": padding, "crowd": draw(st.integers(k, num_experts))}
    return random_experts(case, torch.Generator(DEVICE).manual_seed(draw(st.integers(0, 2**31)))), num_experts, draw(st.sampled_from([16, 32, 64, 128]))


@settings(max_examples=examples(25), derandomize=repeatable(), deadline=None, database=None)
@given(choice=choices())
def test_one_program_and_many_make_the_same_lists(choice: tuple[torch.Tensor, int, int]) -> None:
    check_lists(*choice)


def check_lists(experts: torch.Tensor, num_experts: int, rows: int) -> None:
    want = listed(experts, num_experts, rows, "plain")
    for how in ("few", "many"):
        for name, got in listed(experts, num_experts, rows, how).items():
            assert torch.equal(got, want[name]), (how, name)


def test_lists_of_few_pairs_with_padding() -> None:
    experts = random_experts({"T": 30, "E": 5, "k": 2, "padding": (0, 7, 29)}, torch.Generator(DEVICE).manual_seed(4))
    check_lists(experts, 5, 16)


def test_many_pairs_take_more_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program for one expert; a block in the middle has none of its pairs."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    experts = random_experts({"T": 300, "E": 6, "k": 2, "padding": (0, 299)}, torch.Generator(DEVICE).manual_seed(2))
    experts[100:160] = torch.tensor([0, 1])
    for name, got in listed(experts, 6, 16, "many").items():
        assert torch.equal(got, listed(experts, 6, 16, "plain")[name]), name


@settings(max_examples=examples(300), derandomize=repeatable(), deadline=None, database=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40), rows=st.sampled_from([16, 32, 64, 128]), more=st.integers(0, 50))
def test_no_choice_needs_more_tiles_than_there_is_room_for(counts: list[int], rows: int, more: int) -> None:
    """Padding pairs have no expert, so there may be room for more of them than are listed; fewer rows a tile and more pairs need no less."""
    needed = sum(-(-count // rows) for count in counts)
    room = plain.max_tiles(sum(counts) + more, len(counts), rows)
    assert needed <= room <= plain.max_tiles(sum(counts) + more + 1, len(counts), rows)
    assert room <= plain.max_tiles(sum(counts) + more, len(counts) + 1, rows)
    assert room <= plain.max_tiles(sum(counts) + more, len(counts), LEAST_ROWS)


@pytest.mark.parametrize(("num_pairs", "num_experts", "rows"), [(8, 256, 16), (8, 8, 16), (40, 8, 16), (65536, 256, 128), (100, 7, 32)])
def test_some_choice_needs_every_tile(num_pairs: int, num_experts: int, rows: int) -> None:
    counts = [1] * min(num_pairs, num_experts)
    counts[0] += num_pairs - len(counts)
    assert sum(-(-count // rows) for count in counts) == plain.max_tiles(num_pairs, num_experts, rows)


def test_no_step_up_to_a_size_needs_more_tiles_than_the_size_has_room_for() -> None:
    """Smaller steps have tiles of fewer rows; room reckoned with the least holds them all."""
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), None):
        for num_experts in (8, 128, 256, 512):
            room = plain.max_tiles(8 * 8192, num_experts, LEAST_ROWS)
            for num_pairs in {8 * 2**i for i in range(14)} | {bound * num_experts for bound in BOUNDS}:
                rows = tiling_for(capability, torch.bfloat16, num_pairs, num_experts).rows
                assert rows >= LEAST_ROWS
                assert plain.max_tiles(num_pairs, num_experts, rows) <= room


# What is broken, and the test that must find it.
MUTANTS = {
    "ties to the higher number": (
        "route_kernel", "(BLOCK - 1 - i)", "i",
        lambda: test_of_experts_that_tie_the_lower_numbers_are_chosen_in_ascending_order(torch.float32),
    ),
    "experts in another order": (
        "route_kernel", "tl.cumsum(chosen.to(tl.int32), axis=0) - 1", "k - tl.cumsum(chosen.to(tl.int32), axis=0)",
        lambda: test_of_experts_that_tie_the_lower_numbers_are_chosen_in_ascending_order(torch.float32),
    ),
    "a padding token gets experts": ("route_kernel", "tl.load(TOKEN_ROW + t) >= 0", "tl.load(TOKEN_ROW + t) >= -1", lambda: test_padding_gets_no_expert()),
    "a NaN left as it is": (
        "route_kernel", "bitcast=True), 0x7FC00000)", "bitcast=True), -1)",
        lambda: test_whatever_the_logits_are_experts_are_distinct_and_there(torch.nan, 3),
    ),
    "logits taken for packed": (
        "route_kernel", "LOGITS + t * stride + i", "LOGITS + t * E + i", lambda: test_the_choice_is_the_references(torch.float32),
    ),
    "an expert's pairs begin one place late": (
        "sort_kernel", "place = tl.sum(before, axis=0)", "place = tl.sum(before, axis=0) + (e > 3)", lambda: test_lists_of_few_pairs_with_padding(),
    ),
    "a pair that has no expert is listed": (
        "group_few_kernel", "live = (mine >= 0) & (mine < E)", "live = mine < E", lambda: test_lists_of_few_pairs_with_padding(),
    ),
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="what a wrong kernel does to a device's context would outlive its test")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(mutant: str) -> None:
    name, old, new, test = MUTANTS[mutant]
    with edited(f"twinfer.kernels.router.kernel:{name}", old, new)(), pytest.raises(AssertionError):
        test()
