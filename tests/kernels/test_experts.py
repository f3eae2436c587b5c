"""A layer's experts: every tile computes the products, no tile lets a token's company show, and the whole is the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tests.kernels.guard import same_bits
from tests.kernels.order import sum_in_order
from tests.kernels.test_operations import DEVICE, DTYPES, dtype_name, label, plain_outputs, relative_error
from twinfer.invariants.faults.switch import edited
from twinfer.kernels.experts import kernel, plain
from twinfer.kernels.experts.operation import COMBINE, DOWN, GATE_UP
from twinfer.kernels.experts.tiles import BOUNDS, INTERPRETER, Tile, Tiling, entries, tiling_for
from twinfer.kernels.matmul.kernel import launch
from twinfer.kernels.matmul.tiles import INTERPRETER as MATMUL_INTERPRETER
from twinfer.kernels.matmul.tiles import SHARED_LIMIT, family
from twinfer.kernels.operation import Operation
from twinfer.kernels.router import kernel as router
from twinfer.kernels.router.operation import unlisted
from twinfer.kernels.swiglu.kernel import swiglu
from twinfer.reference import moe

NAMES = tuple(SHARED_LIMIT)
# Of this machine's device, or all that the interpreter can run.
FAMILIES = (family(torch.cuda.get_device_capability()),) if DEVICE == "cuda" else NAMES
SERVING = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Weights through descriptors, which no table has yet: where rows start on 16 bytes, and either operand order.
DESCRIBED = (Tiling(32, Tile(64, 64, 4, 3, swap=True, tma=True), Tile(64, 64, 4, 3, tma=True)),)


def tilings(dtype: torch.dtype) -> list[Tiling]:
    """Every tiling that serves `dtype`, and the interpreter's own."""
    found = [tiling for name in FAMILIES for tiling in entries(name, dtype)]
    described = DESCRIBED if dtype != torch.float32 and (DEVICE == "cpu" or torch.cuda.get_device_capability() >= (9, 0)) else ()
    return list(dict.fromkeys([*found, *described, *([INTERPRETER] if DEVICE == "cpu" else [])]))


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("operation", [GATE_UP, DOWN], ids=label)
def test_every_tile_computes_the_product(operation: Operation, dtype: torch.dtype) -> None:
    """A second tile of pairs, of weight rows and of K, none of them full; rows start on 16 bytes."""
    for tiling in tilings(SERVING if dtype == DTYPES[1] else dtype):
        tile = tiling.gate_up if operation is GATE_UP else tiling.down
        n, k = tile.bn + 8, tile.bk + 24
        h, m = (k, n) if operation is GATE_UP else (n, k)
        case = {"T": tiling.rows + 3, "E": 3, "k": 2, "h": h, "m": m, "crowd": 2, "padding": (1,), "tiling": tiling}
        given = operation.make(case, dtype, torch.Generator(DEVICE).manual_seed(4))
        want = plain_outputs(operation, given, wide=True)
        operation.triton(**given.tensors, **given.constants)
        for name in given.outputs:
            error = relative_error(given.tensors[name], want[name])
            assert error <= operation.tolerance[dtype_name(dtype)], f"{tiling}: {error:.2e} from float64"


def test_a_tile_with_descriptors_also_reads_rows_that_start_anywhere() -> None:
    case = {"T": 5, "E": 3, "k": 2, "h": 37, "m": 21, "tiling": DESCRIBED[0]}  # 74 and 42 bytes a row
    for operation in (GATE_UP, DOWN):
        given = operation.make(case, DTYPES[1], torch.Generator(DEVICE).manual_seed(4))
        want = plain_outputs(operation, given, wide=True)
        operation.triton(**given.tensors, **given.constants)
        for name in given.outputs:
            assert relative_error(given.tensors[name], want[name]) <= operation.tolerance[dtype_name(DTYPES[1])]


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_bits_are_those_of_a_dense_product_and_swiglu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert, whose products are then kernels/matmul's: the fused epilogue rounds where separate operations do."""
    sum_in_order(monkeypatch)
    tokens, h, m = (300, 2048, 512) if DEVICE == "cuda" else (7, 48, 40)
    case = {"T": tokens, "E": 1, "k": 1, "h": h, "m": m}
    gated = GATE_UP.make(case, dtype, torch.Generator(DEVICE).manual_seed(5))
    both, dense = (torch.empty(tokens, width, dtype=dtype, device=DEVICE) for width in (2 * m, m))
    launch(gated.tensors["x"], gated.tensors["weight"][0], both, None, MATMUL_INTERPRETER)
    swiglu(both, dense)
    GATE_UP.triton(**gated.tensors, **gated.constants)
    assert same_bits(gated.tensors["activated"], dense)
    second = DOWN.make(case, dtype, torch.Generator(DEVICE).manual_seed(6))
    whole = torch.empty(tokens, h, dtype=dtype, device=DEVICE)
    launch(second.tensors["activated"], second.tensors["weight"][0], whole, None, MATMUL_INTERPRETER)
    DOWN.triton(**second.tensors, **second.constants)
    assert same_bits(second.tensors["outputs"][:, 0], whole)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_fits_into_its_familys_shared_memory(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tiling in entries(name, dtype):
            for tile, gated in ((tiling.gate_up, True), (tiling.down, False)):
                assert tile.shared_bytes(tiling.rows, dtype.itemsize, gated) <= SHARED_LIMIT[name], (tiling, dtype)
                assert not tile.tma or name in ("9.0", "10.0"), "no descriptors there"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (99, 0)])
def test_the_table_answers_for_every_size_with_an_entry_that_the_gate_compiles(capability: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        compiled = entries(family(capability), dtype)
        found = [tiling_for(capability, dtype, 64 * bound + more, 64) for bound in (*BOUNDS, 1000) for more in (0, 1)]
        assert set(found) == set(compiled), "every entry serves some step"
        assert [tiling.rows for tiling in found] == sorted(tiling.rows for tiling in found)


# -------------------------------------------------------------------------------------------------------- a whole layer


@dataclass(frozen=True)
class Layer:
    """Weights of a layer's experts, and what its tokens bring: x [n, h], logits [n, E], a shared expert's outputs and gates."""

    x: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: torch.Tensor
    shared_gate: torch.Tensor
    k: int

    @staticmethod
    def random(num_tokens: int, num_experts: int, k: int, h: int, m: int, dtype: torch.dtype, skew: float = 0.0) -> Layer:
        """skew: how much more likely the first experts are."""
        generator = torch.Generator(DEVICE).manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        logits = draw(num_tokens, num_experts) - skew * torch.arange(num_experts, device=DEVICE)
        weights = draw(num_experts, 2 * m, h) * h**-0.5, draw(num_experts, h, m) * m**-0.5
        tensors = (draw(num_tokens, h), logits, *weights, draw(num_tokens, h), draw(num_tokens))
        return Layer(*(tensor.to(dtype) for tensor in tensors), k)

    def run(self, tokens: Sequence[int | None], tiling: Tiling) -> torch.Tensor:
        """[len(tokens), h]: these tokens in one launch of each kernel; None is padding, whose every input is NaN."""
        live = torch.tensor([token is not None for token in tokens], device=DEVICE)
        index = torch.tensor([token or 0 for token in tokens], device=DEVICE)

        def of(tensor: torch.Tensor) -> torch.Tensor:
            taken = tensor[index]
            taken[~live] = torch.nan
            return taken

        num_tokens, (num_experts, h, m) = len(tokens), self.down.shape
        options = {"dtype": self.x.dtype, "device": DEVICE}
        shares = torch.full((num_tokens, self.k), torch.nan, **options)
        experts = torch.full((num_tokens, self.k), -7, dtype=torch.int32, device=DEVICE)
        router.route(of(self.logits), live.to(torch.int32) - 1, shares, experts, True)
        lists = unlisted(experts.numel(), num_experts, tiling.rows, experts.device)
        router.group(experts, **lists, rows=tiling.rows)
        del lists["offsets"]
        activated, outputs = torch.full((experts.numel(), m), torch.nan, **options), torch.full((num_tokens, self.k, h), torch.nan, **options)
        out = torch.full((num_tokens, h), torch.nan, **options)
        kernel.grouped_gate_up(of(self.x), **lists, weight=self.gate_up, activated=activated, num_per_token=self.k, tiling=tiling)
        kernel.grouped_down(activated, **lists, weight=self.down, outputs=outputs, tiling=tiling)
        kernel.combine(outputs, shares, experts, out, of(self.shared), of(self.shared_gate))
        return out


SIZES = (200, 32, 8, 512, 256) if DEVICE == "cuda" else (21, 5, 2, 40, 24)
# Which tokens are launched together. The interpreter takes the first 21.
BATCHES: dict[str, list[int | None]] = {
    "alone": [4],
    "two": [20, 4],
    "reversed": list(range(20, -1, -1)),
    "padding between": [None, 3, None, None, 4, 20, None, 0, 1, None],
    "padding alone": [None, None],
    "one of many": [*range(5, 21), 4],
    "whole": list(range(SIZES[0])),
}


@cache
def alone(dtype: torch.dtype, skew: float) -> tuple[Layer, torch.Tensor]:
    """A layer, and what each of its tokens gives in a launch of its own by the smallest tile."""
    layer = Layer.random(*SIZES, dtype, skew)
    small = min(tilings(SERVING if dtype == DTYPES[1] else dtype), key=lambda tiling: tiling.rows)
    return layer, torch.cat([layer.run([token], small) for token in range(SIZES[0])])


def law_2(dtype: torch.dtype, skew: float, chosen: Sequence[Tiling]) -> None:
    layer, want = alone(dtype, skew)
    assert want.isfinite().all()
    for tiling in chosen:
        for name, tokens in BATCHES.items():
            got = layer.run(tokens, tiling)
            for i, token in enumerate(tokens):
                expected = torch.zeros_like(want[0]) if token is None else want[token]
                assert same_bits(got[i], expected), f"{tiling}, {name}: token {token} at {i}"


def distinct(chosen: list[Tiling]) -> list[Tiling]:
    """Those of other rows or another order of operands: what could show in the interpreter, where the rest is one arithmetic."""
    return list({(tiling.rows, tiling.gate_up.swap): tiling for tiling in chosen}.values())


@pytest.mark.parametrize("skew", [0.0, 9.0], ids=["spread", "all to the first experts"])
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_law_2(dtype: torch.dtype, skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile, any batch, order and padding give a token the bits that it has alone; padding gives zeros."""
    sum_in_order(monkeypatch)
    chosen = tilings(SERVING if dtype == DTYPES[1] else dtype)
    if DEVICE == "cpu":
        chosen = [tiling for tiling in distinct(chosen) if dtype == torch.float32 or tiling.rows in (16, 64)]
    law_2(dtype, skew, chosen)


@pytest.mark.parametrize("k", [1, 4])
def test_every_expert_or_one(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """k = 1, and k = E, where each expert gets every token."""
    sum_in_order(monkeypatch)
    layer = Layer.random(18, 4, k, 40, 24, torch.float32)
    wide = replace(INTERPRETER, rows=64)
    got = layer.run(range(18), wide)
    for token in range(18):
        assert same_bits(layer.run([token], INTERPRETER)[0], got[token]), token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=label)
@pytest.mark.parametrize("skew", [0.0, 9.0])
def test_the_layer_is_the_references(dtype: torch.dtype, skew: float) -> None:
    """Kernels in float32 against the reference in float32 and in float64; measured on a CPU: 1.5e-7 from float64, as the reference itself."""
    layer = Layer.random(*SIZES, torch.float32, skew)
    x, logits, gate_up, down, shared, shared_gate = (t.to(dtype) for t in (layer.x, layer.logits, layer.gate_up, layer.down, layer.shared, layer.shared_gate))
    shares, experts = moe.route(logits, torch.eye(logits.shape[1], dtype=dtype, device=DEVICE), layer.k, True)
    want = moe.mix(x, shares, experts, gate_up, down) + torch.sigmoid(shared_gate)[:, None] * shared
    error = relative_error(layer.run(range(SIZES[0]), kernel.tiling(layer.x.device, torch.float32, SIZES[0] * layer.k, SIZES[1])), want)
    assert error <= 2e-6, f"{error:.2e}"


def test_the_sum_is_nearer_than_the_references() -> None:
    """bf16, k = 8 and a shared expert, as root mean squares of the distance from float64: measured 1.7e-3 of the values' own, the reference 3.4e-3."""
    case = {"T": 200, "E": 256, "k": 8, "h": 64, "shared": True}
    given = COMBINE.make(case, torch.bfloat16, torch.Generator(DEVICE).manual_seed(8))
    want = plain_outputs(COMBINE, given, wide=True)["out"]
    t = given.tensors
    added = torch.zeros_like(t["out"])
    for j in range(8):
        added += t["outputs"][:, j] * t["shares"][:, j, None]
    added = added + torch.sigmoid(t["shared_gate"]) * t["shared"]
    plain.combine(**t)
    ours, theirs = ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt() for got in (t["out"], added))
    assert ours < 0.6 * theirs, (ours, theirs)
    assert (t["out"].double() - want).abs().max() <= (added.double() - want).abs().max()


# ------------------------------------------------------------------------------------------------- what the tests find

_KERNEL = "experts_kernel"
# What is broken, and the test that must find it.
MUTANTS = {
    "K the other way in wide tiles": (
        _KERNEL, "for k in range(0, K, BK):", "for k in range(0, K, BK) if ROWS < 64 else range(K - K % BK, -1, -BK):",
        lambda: law_2(torch.float32, 0.0, [replace(INTERPRETER, rows=64, gate_up=Tile(64, 16, 4, 1))]),
    ),
    "the next expert's weight": (
        _KERNEL, "w0 = expert * 2 * N", "w0 = (expert + 1) * 2 * N % (5 * 2 * N)", lambda: test_the_layer_is_the_references(torch.float32, 0.0),
    ),
    "a pair's output in a neighbour's place": (
        _KERNEL, "target = pair.to(tl.int64)", "target = (pair ^ 1).to(tl.int64)", lambda: test_the_layer_is_the_references(torch.float32, 0.0),
    ),
    "the tile's token instead of the pair's": (
        _KERNEL, "source = (pair // num_per_token).to(tl.int64)", "source = (pair // (num_per_token + 1)).to(tl.int64)",
        lambda: test_the_layer_is_the_references(torch.float32, 0.0),
    ),
    "experts added from the last on": (
        "combine_kernel", "for j in tl.static_range(k):", "for j in range(k - 1, -1, -1):", lambda: check_order(),
    ),
    "a shared expert for padding": (
        "combine_kernel", "mask=inside & any_live, other=0.0", "mask=inside, other=0.0", lambda: law_2(torch.float32, 0.0, [INTERPRETER]),
    ),
}  # fmt: skip


def check_order() -> None:
    """The sum goes from the lowest expert on: one that vanishes beside the first is lost, and is not where the large ones have cancelled before."""
    outputs = torch.tensor([1.0, 2.0**26, -(2.0**26)], device=DEVICE).view(1, 3, 1)
    shares, out = torch.ones(1, 3, device=DEVICE), torch.full((1, 1), torch.nan, device=DEVICE)
    kernel.combine(outputs, shares, torch.tensor([[0, 1, 2]], dtype=torch.int32, device=DEVICE), out)
    assert out.item() == 0.0


def test_experts_are_added_in_ascending_order() -> None:
    check_order()


@pytest.mark.skipif(DEVICE != "cpu", reason="what a wrong kernel does to a device's context would outlive its test")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)
    name, old, new, test = MUTANTS[mutant]
    alone(torch.float32, 0.0)  # what is right, by the right kernels
    with edited(f"twinfer.kernels.experts.kernel:{name}", old, new)(), pytest.raises(AssertionError):
        test()
