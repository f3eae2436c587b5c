"""The matmul's tiles and tables: every tile computes the product, no tile lets M show, all fit their device, and cuBLAS serves only what was measured."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.kernels.guard import same_bits
from tests.kernels.test_operations import DEVICE, DTYPES, dtype_name, label, plain_outputs, relative_error
from twinfer.kernels.matmul import cublas
from twinfer.kernels.matmul.kernel import launch, matmul
from twinfer.kernels.matmul.operation import MATMUL
from twinfer.kernels.matmul.tiles import BOUNDS, INTERPRETER, SHARED_LIMIT, Tile, entries, family, tile_for
from twinfer.kernels.operation import Example

NAMES = tuple(SHARED_LIMIT)
# Of this machine's device, or all that the interpreter can run.
FAMILIES = (family(torch.cuda.get_device_capability()),) if DEVICE == "cuda" else NAMES
SERVING = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def tiles(dtype: torch.dtype) -> list[Tile]:
    """Every tile that serves `dtype`, and the interpreter's own."""
    found = [tile for name in FAMILIES for tile in entries(name, dtype)]
    return list(dict.fromkeys([*found, INTERPRETER] if DEVICE == "cpu" else found))


def example(m: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> Example:
    return MATMUL.make({"M": m, "N": n, "K": k, "bias": bias}, dtype, torch.Generator(DEVICE).manual_seed(4))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype, device=x.device)
    launch(x, weight, out, bias, tile)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_every_tile_computes_the_product_and_no_row_depends_on_m(dtype: torch.dtype) -> None:
    for tile in tiles(SERVING if dtype == DTYPES[1] else dtype):
        m, n, k = tile.bm + 3, tile.bn + 5, tile.bk + 24  # a second tile each way and a second step, none of them full; rows start on 16 bytes
        given = example(m, n, k, dtype, bias=True)
        x, weight, bias = given.tensors["x"], given.tensors["weight"], given.tensors["bias"]
        whole = product(x, weight, bias, tile)
        error = relative_error(whole, plain_outputs(MATMUL, given, wide=True)["out"])
        assert error <= MATMUL.tolerance[dtype_name(dtype)], f"{tile}: {error:.2e} from float64"
        alone = range(m) if DEVICE == "cuda" or m < 20 else (0, 1, tile.bm // 2, tile.bm - 1, tile.bm, m - 1)
        for i in alone:
            assert same_bits(product(x[i : i + 1], weight, bias, tile), whole[i : i + 1]), f"{tile}: row {i} alone"


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_rows_have_the_same_bits_at_every_m_of_a_launch(dtype: torch.dtype) -> None:
    """Through the table: on a GPU across all the tiles that M selects, which is the law; in the interpreter by its one tile."""
    most, n, k = (700, 6144, 4096) if DEVICE == "cuda" else (150, 70, 200)
    given = example(most, n, k, dtype, bias=False)
    x, weight, whole = given.tensors["x"], given.tensors["weight"], given.tensors["out"]
    matmul(x, weight, whole)
    for m in sorted({1, 2, 15, 16, 17, 63, 64, 65, 128, 129, *(b + 1 for b in BOUNDS)} & set(range(most))):
        some = torch.full_like(whole[:m], torch.nan)
        matmul(x[-m:].clone(), weight, some)
        assert same_bits(some, whole[-m:]), f"M = {m}"


@pytest.mark.skipif(DEVICE == "cpu", reason="numpy's bits depend on the tile")
@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_all_tiles_of_a_device_give_the_same_bits(dtype: torch.dtype) -> None:
    given = example(200, 1024, 2048, dtype, bias=True)
    x, weight, bias = given.tensors["x"], given.tensors["weight"], given.tensors["bias"]
    first, *others = tiles(dtype)
    want = product(x, weight, bias, first)
    for tile in others:
        assert same_bits(product(x, weight, bias, tile), want), tile


def test_a_tile_with_descriptors_also_reads_rows_that_start_anywhere() -> None:
    tile = next(t for t in entries("9.0", torch.bfloat16) if t.tma)
    given = example(5, 40, 37, DTYPES[1], bias=False)  # 74 bytes a row
    out = product(given.tensors["x"], given.tensors["weight"], None, tile)
    assert relative_error(out, plain_outputs(MATMUL, given, wide=True)["out"]) <= MATMUL.tolerance[dtype_name(DTYPES[1])]


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_fits_into_its_familys_shared_memory(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tile in entries(name, dtype):
            assert tile.shared_bytes(dtype.itemsize) <= SHARED_LIMIT[name], (tile, dtype)


def test_a_descriptor_is_only_in_the_tables_of_devices_that_have_them() -> None:
    assert not any(tile.tma for name in ("8.0", "8.6") for tile in entries(name, torch.bfloat16))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (99, 0)])
def test_the_table_answers_for_every_shape_with_an_entry_that_the_gate_compiles(capability: tuple[int, int]) -> None:
    name = family(capability)
    for dtype in (torch.bfloat16, torch.float32):
        compiled = entries(name, dtype)
        for n, k in ((6144, 4096), (151936, 1024), (64, 48), (1024, 2048), (34816, 5120)):
            for m in (1, *BOUNDS, *(b + 1 for b in BOUNDS), 32768):
                assert tile_for(capability, dtype, m, n, k) in compiled


def test_every_tuned_bk_divides_its_k() -> None:
    for n, k in cublas.TABLE[H200]:
        for m in (1, *BOUNDS, 8192):
            assert k % tile_for((9, 0), torch.bfloat16, m, n, k).bk == 0, (n, k, m)


H200 = cublas.Stack("NVIDIA H200", (9, 0), "13.1.0.3", "2.11")
# (N, K) -> the M, as ranges, at which cuBLAS was seen to differ from one chain (bench/probes/RESULTS.md)
DIFFERS = {
    (1024, 3072): ((1, 72), (81, 128), (144, 144)),
    (2560, 4096): ((1, 40), (48, 56), (65, 72), (80, 80)),
    (2560, 9728): ((1, 160), (168, 176), (184, 184), (192, 200), (208, 208), (216, 224), (241, 256)),
    (4096, 4096): ((1, 24), (32, 40), (48, 48)),
    (4096, 12288): ((1, 168), (176, 176), (184, 184), (200, 200), (208, 208), (216, 216), (224, 224), (232, 232), (240, 240), (256, 256), (336, 336)),
    (5120, 8192): ((1, 112), (136, 136), (145, 153), (156, 156), (160, 160)),
    (5120, 25600): ((1, 240), (248, 248), (256, 256), (264, 304), (313, 320), (481, 512)),
}


def test_cublas_serves_no_size_at_which_it_differed() -> None:
    for (n, k), ranges in DIFFERS.items():
        assert not any(cublas.serves(H200, torch.bfloat16, m, n, k) for low, high in ranges for m in range(low, high + 1)), (n, k)
        assert cublas.serves(H200, torch.bfloat16, 8192, n, k)


@pytest.mark.parametrize(
    ("on", "dtype", "shape", "want"),
    [
        (H200, torch.bfloat16, (4096, 6144, 4096), True),
        (H200, torch.float32, (4096, 6144, 4096), False),
        (H200, torch.float16, (4096, 6144, 4096), False),
        (H200, torch.bfloat16, (8193, 6144, 4096), False),
        (H200, torch.bfloat16, (4096, 6144, 4097), False),
        (H200, torch.bfloat16, (1025, 151936, 4096), False),
        (None, torch.bfloat16, (4096, 6144, 4096), False),
        (cublas.Stack("NVIDIA H100", (9, 0), "13.1.0.3", "2.11"), torch.bfloat16, (4096, 6144, 4096), False),
        (cublas.Stack("NVIDIA H200", (9, 0), "13.2.0.9", "2.11"), torch.bfloat16, (4096, 6144, 4096), False),
        (cublas.Stack("NVIDIA H200", (9, 0), "13.1.0.3", "2.12"), torch.bfloat16, (4096, 6144, 4096), False),
        (cublas.Stack("NVIDIA H200", (9, 0), "13.1.0.3", "2.11", "workspace :4096:8"), torch.bfloat16, (4096, 6144, 4096), False),
    ],
)
def test_cublas_serves_only_what_was_measured(on: cublas.Stack | None, dtype: torch.dtype, shape: tuple[int, int, int], want: bool) -> None:
    assert cublas.serves(on, dtype, *shape) is want


def test_products_without_a_table_entry_are_the_kernel() -> None:
    given = example(9, 70, 64, DTYPES[1], bias=True)
    t = given.tensors
    ours = torch.empty_like(t["out"])
    cublas.Products.checked([t["weight"]], range(1, 20)).linear(**t)
    matmul(t["x"], t["weight"], ours, t["bias"])
    assert same_bits(t["out"], ours)


@pytest.mark.parametrize("other", [None, 40])
def test_cublas_serves_the_sizes_that_were_compared_when_the_engine_started(other: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these sizes those in the table's range; none of a weight for which a single one differed, which is told."""
    weights = [torch.zeros(6, 4, dtype=torch.bfloat16), torch.zeros(8, 4, dtype=torch.bfloat16)]
    monkeypatch.setattr(cublas, "stack", lambda device: H200)
    monkeypatch.setitem(cublas.TABLE, H200, {(6, 4): cublas.Served(32, 64), (8, 4): cublas.Served(1)})  # type: ignore[misc]
    compared: list[list[int]] = []

    def differing(weight: torch.Tensor, sizes: list[int]) -> list[int]:
        compared.append(sizes)
        return [] if other is None or len(weight) == 8 else [other]

    served: list[tuple[int, int]] = []
    monkeypatch.setattr(cublas, "differing", differing)
    monkeypatch.setattr(cublas, "matmul", lambda x, weight, out, bias: None)
    monkeypatch.setattr(torch, "mm", lambda x, weight, out: served.append((len(x), weight.shape[1])))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        products = cublas.Products.checked(weights, (16, 40, 48, 80, 48))
    assert compared == [[40, 48], [16, 40, 48, 80]]
    assert len(told) == (other is not None)
    assert all("[6, 4] at M = 40" in str(each.message) for each in told)
    for m in (16, 40, 41, 48, 80):
        for weight in weights:
            products.linear(torch.zeros(m, 4, dtype=torch.bfloat16), weight, torch.zeros(m, len(weight), dtype=torch.bfloat16))
    wanted = [(40, 6), (48, 6)] if other is None else []
    assert sorted(served) == sorted([*wanted, (16, 8), (40, 8), (48, 8), (80, 8)])
    served.clear()
    products.linear(torch.zeros(40, 4, dtype=torch.bfloat16), weights[1], torch.zeros(40, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16))
    products.linear(torch.zeros(40, 4, dtype=torch.bfloat16), weights[1], torch.zeros(40, 8, dtype=torch.float32))
    assert served == [], "a bias, or a result of another dtype, was never compared"


def test_settings_that_change_what_cublas_picks_are_part_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cublas.settings()
    assert usual == H200.settings
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas.settings() != usual
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        assert cublas.settings() != usual
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.mark.skipif(DEVICE == "cpu", reason="compares cuBLAS with the kernel on the device")
def test_what_the_table_says_of_this_device_holds() -> None:
    on = cublas.stack(torch.device(DEVICE, torch.cuda.current_device()))
    served = cublas.TABLE.get(on, {}) if on else {}
    if not served:
        pytest.skip(f"no entry for {on}")
    for (n, k), entry in served.items():
        weight = torch.randn(n, k, device=DEVICE).to(torch.bfloat16)
        sizes = [m for m in (*range(1, 513, 13), 337, 513, 704, 1000, 1024, 1500, 2048, 3001, 8192) if cublas.serves(on, torch.bfloat16, m, n, k)]
        assert cublas.differing(weight, [*sizes, entry.first, entry.last]) == [], (n, k)
