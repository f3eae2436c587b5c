"""The experts' operations: both forms of each, their inputs, their tolerances, and the kernels that serving compiles."""

from __future__ import annotations

from typing import Any

import torch

from twinfer.kernels.experts import kernel, plain
from twinfer.kernels.experts.tiles import COMBINE_BLOCK, COMBINE_WARPS, Tile, Tiling, entries
from twinfer.kernels.matmul.tiles import family
from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.router import plain as router
from twinfer.kernels.router.operation import CHOICES, random_experts, unlisted

# Widths (h, m): Qwen3-30B-A3B, Qwen3.5 and 3.6 and Qwen3-Next, the golden checkpoints.
WIDTHS = ((2048, 768), (2048, 512), (64, 32))


def _random(shape: tuple[int, ...], scale: float, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=generator, device=generator.device)).to(dtype)


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=generator.device)


def _lists(case: Case, generator: torch.Generator) -> tuple[Tiling, torch.Tensor, dict[str, torch.Tensor]]:
    """(tiling, experts [T, k], what `group` makes of them). `tiling` may be the case's."""
    chosen = case.get("tiling") or kernel.tiling(generator.device, torch.bfloat16, case["T"] * case["k"], case["E"])
    experts = random_experts(case, generator)
    lists = unlisted(experts.numel(), case["E"], chosen.rows, generator.device)
    router.group(experts, **lists, rows=chosen.rows)
    return chosen, experts, {name: lists[name] for name in ("pairs", "tiles", "num_tiles")}


def _weight(experts: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """[E, ...] with sums of about 1; NaN for experts that nobody has chosen."""
    weight = _random(shape, shape[-1] ** -0.5, dtype, generator)
    used = torch.zeros(shape[0], dtype=torch.bool, device=generator.device).index_fill(0, experts[experts >= 0].long(), True)
    weight[~used] = torch.nan
    return weight


def make_gate_up(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T, E, k, h, m, and what `random_experts` takes; a `tiling` of its own. Tokens of padding are NaN."""
    tiling, experts, lists = _lists(case, generator)
    x = _random((case["T"], case["h"]), 1.0, dtype, generator)
    x[experts[:, 0] < 0] = torch.nan
    weight = _weight(experts, (case["E"], 2 * case["m"], case["h"]), dtype, generator)
    activated = _unwritten((experts.numel(), case["m"]), dtype, generator)
    constants: dict[str, Any] = {"num_per_token": case["k"], "tiling": tiling}
    return Example({"x": x, **lists, "weight": weight, "activated": activated}, constants, outputs=("activated",))


def make_down(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """As `make_gate_up`. Rows of `activated` that no pair has are NaN."""
    tiling, experts, lists = _lists(case, generator)
    activated = _random((experts.numel(), case["m"]), 1.0, dtype, generator)
    activated[int((experts >= 0).sum()) :] = torch.nan
    weight = _weight(experts, (case["E"], case["h"], case["m"]), dtype, generator)
    outputs = _unwritten((*experts.shape, case["h"]), dtype, generator)
    return Example({"activated": activated, **lists, "weight": weight, "outputs": outputs}, {"tiling": tiling}, outputs=("outputs",))


def make_combine(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T, E, k, h, and what `random_experts` takes; `shared`: there is an expert that every token goes through. All of padding is NaN."""
    experts = random_experts(case, generator)
    shape = (case["T"], case["h"])
    shares = torch.rand(experts.shape, generator=generator, device=generator.device)
    shares = (shares / shares.sum(-1, keepdim=True)).to(dtype)
    tensors = {"outputs": _random((*experts.shape, case["h"]), 1.0, dtype, generator), "shares": shares}
    if case.get("shared"):
        tensors |= {"shared": _random(shape, 1.0, dtype, generator), "shared_gate": _random((case["T"], 1), 2.0, dtype, generator)}
    for tensor in tensors.values():
        tensor[experts[:, 0] < 0] = torch.nan
    return Example({**tensors, "experts": experts, "out": _unwritten(shape, dtype, generator)})


def _plain_gate_up(tiling: Tiling, **arguments: Any) -> None:
    plain.gate_up(**arguments)


def _plain_down(tiling: Tiling, **arguments: Any) -> None:
    plain.down(**arguments)


_CASES: tuple[Case, ...] = (
    {"T": 1, "E": 8, "k": 3, "h": 64, "m": 32},
    {"T": 40, "E": 5, "k": 2, "h": 96, "m": 40, "padding": (0, 7, 39)},
    {"T": 35, "E": 6, "k": 1, "h": 24, "m": 136, "crowd": 1},
    {"T": 4, "E": 4, "k": 4, "h": 136, "m": 24},
    {"T": 3, "E": 9, "k": 2, "h": 64, "m": 32, "padding": (0, 1, 2)},
)
_LARGE: tuple[Case, ...] = tuple({"T": t, "E": e, "k": 8, "h": 2048, "m": m} for e, m in ((256, 512), (128, 768)) for t in (1, 8, 64, 256, 2048, 8192))

# Beside each tolerance: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU.
GATE_UP = Operation(
    name="grouped_gate_up",
    plain=_plain_gate_up,
    triton=kernel.grouped_gate_up,
    make=make_gate_up,
    cases=_CASES,
    large=_LARGE,
    tolerance={"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2},  # 4.3e-7, 7.1e-4, 5.9e-3
)
DOWN = Operation(
    name="grouped_down",
    plain=_plain_down,
    triton=kernel.grouped_down,
    make=make_down,
    cases=_CASES,
    large=_LARGE,
    tolerance={"float32": 1e-5, "float16": 6e-4, "bfloat16": 5e-3},  # 2.4e-7, 4.3e-4, 3.2e-3
)
COMBINE = Operation(
    name="combine",
    plain=plain.combine,
    triton=kernel.combine,
    make=make_combine,
    cases=(
        {"T": 1, "E": 8, "k": 3, "h": 64},
        {"T": 5, "E": 20, "k": 8, "h": 1030, "shared": True, "padding": (1, 4)},
        {"T": 3, "E": 16, "k": 16, "h": 7, "shared": True},
        {"T": 2, "E": 4, "k": 1, "h": 100, "padding": (0,)},
    ),
    large=({"T": 8192, "E": 256, "k": 8, "h": 2048, "shared": True}, {"T": 1, "E": 512, "k": 10, "h": 2048, "shared": True}),
    tolerance={"float32": 4e-7, "float16": 6e-4, "bfloat16": 5e-3},  # 1.2e-7, 4.1e-4, 3.4e-3
)


def _products(capability: tuple[int, int], name: str, dtype: torch.dtype) -> list[CompileJob]:
    jobs: dict[Any, CompileJob] = {}
    for tiling in entries(family(capability), dtype):
        for gated, tile in ((True, tiling.gate_up), (False, tiling.down)):
            for h, m in WIDTHS:
                sizes = kernel.constants(tile, tiling.rows, h if gated else m, gated)
                jobs.setdefault((tile, tiling.rows, *sizes.items()), product_job(capability, name, dtype, tile, tiling.rows, sizes, gated))
    return list(jobs.values())


def product_job(capability: tuple[int, int], name: str, dtype: torch.dtype, tile: Tile, rows: int, sizes: dict[str, Any], gated: bool) -> CompileJob:
    """One form of the products' kernel, whose weights are multiples of 16 wide."""
    weight = f"tensordesc<{name}[{tile.bn}, {tile.bk}]>" if tile.tma else f"*{name}"
    lists = dict.fromkeys(("PAIRS", "TILES", "NUM_TILES"), "*i32")
    types = {"X": f"*{name}", **lists, "W": weight, "OUT": f"*{name}", **dict.fromkeys(("CAPACITY", "N", "K", "num_per_token"), "i32")}
    claims = {"async"} if tile.stages > 1 else set()
    if tile.tma:
        claims |= {"tma"}
    if dtype != torch.float32:
        claims |= {"mma", "wgmma"} if capability == (9, 0) and (tile.bn if tile.swap else rows) >= 64 else {"mma"}
    return CompileJob(
        kernel.experts_kernel,
        types,
        sizes,
        tile.warps,
        tile.stages,
        ("N", "K"),
        claims=frozenset(claims),
        shared=tile.shared_bytes(rows, dtype.itemsize, gated),
    )


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """The products for each table entry of a device and dtype, where their tile divides K and where it does not; the sum for each k, with and without a
    shared expert."""
    jobs: list[CompileJob] = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        jobs += _products(capability, name, dtype)
        for k in dict.fromkeys(k for _, k in CHOICES):
            types = {"OUTPUTS": f"*{name}", "SHARES": f"*{name}", "EXPERTS": "*i32", "OUT": f"*{name}", "gate_stride": "i32", "h": "i32"}
            shared = {"SHARED": f"*{name}", "SHARED_GATE": f"*{name}"}
            sizes: dict[str, Any] = {"k": k, "BLOCK": COMBINE_BLOCK}
            jobs.append(CompileJob(kernel.combine_kernel, types | shared, sizes, COMBINE_WARPS, 3, ("gate_stride", "h")))
            jobs.append(CompileJob(kernel.combine_kernel, types, sizes | dict.fromkeys(shared), COMBINE_WARPS, 3, ("h",)))
    return jobs
