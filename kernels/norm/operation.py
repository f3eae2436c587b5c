"""The norm operations: both forms of each, their inputs, their tolerances, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.norm import kernel, plain
from twinfer.kernels.norm.tiles import WIDTHS, row_tile
from twinfer.kernels.operation import Case, CompileJob, Example, Operation

_EPS = 1e-6


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=generator, device=generator.device)).to(dtype)


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=generator.device)


def make_rms_norm(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, h columns; `scale` of the values, so small that eps counts or so large that their squares pass float16; centred."""
    shape = case["T"], case["h"]
    x, weight = _random(shape, dtype, generator, case.get("scale", 1.0)), _random(shape[1:], dtype, generator)
    return Example({"x": x, "weight": weight, "out": _unwritten(shape, dtype, generator)}, {"eps": _EPS, "centred": case.get("centred", False)})


def make_add_rms_norm(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """As `make_rms_norm`, with a residual four times as large as what is added."""
    example = make_rms_norm(case, dtype, generator)
    residual = _random((case["T"], case["h"]), dtype, generator, 4 * case.get("scale", 1.0))
    return Example({"residual": residual, **example.tensors}, example.constants, outputs=("residual", "out"))


_CASES: tuple[Case, ...] = (
    {"T": 1, "h": 64},
    {"T": 5, "h": 96},
    {"T": 3, "h": 2560},
    {"T": 2, "h": 7},
    {"T": 3, "h": 256, "scale": 1e-3},
    {"T": 3, "h": 256, "scale": 1000.0},
    {"T": 3, "h": 96, "centred": True},
    {"T": 2, "h": 2048, "centred": True},
)
_LARGE: tuple[Case, ...] = ({"T": 8192, "h": 4096}, {"T": 256, "h": 5120})

# Beside each tolerance: the distance of the plain form in that dtype from float64, the largest of all cases and outputs, on a CPU.
RMS_NORM = Operation(
    name="rms_norm",
    plain=plain.rms_norm,
    triton=kernel.rms_norm,
    make=make_rms_norm,
    cases=_CASES,
    large=_LARGE,
    tolerance={"float32": 3e-7, "float16": 1e-3, "bfloat16": 8e-3},  # 8.6e-8, 4.6e-4, 5.7e-3
)
ADD_RMS_NORM = Operation(
    name="add_rms_norm",
    plain=plain.add_rms_norm,
    triton=kernel.add_rms_norm,
    make=make_add_rms_norm,
    cases=_CASES,
    large=_LARGE,
    tolerance={"float32": 4e-7, "float16": 1e-3, "bfloat16": 1e-2},  # 1.7e-7, 7.1e-4, 6.6e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each width, dtype and kind of weight, the same on every device."""
    jobs: list[CompileJob] = []
    for width in WIDTHS:
        block, warps = row_tile(width)
        for t in ("*bf16", "*fp16", "*fp32"):
            tail = {"WEIGHT": t, "OUT": t, "h": "i32", "eps": "fp32"}
            for centred in (False, True):
                sizes = {"BLOCK": block, "CENTRED": centred}
                jobs.append(CompileJob(kernel.rms_norm_kernel, {"X": t, **tail}, sizes, warps, 3, ("h",)))
                jobs.append(CompileJob(kernel.add_rms_norm_kernel, {"X": t, "RESIDUAL": t, **tail}, sizes, warps, 3, ("h",)))
    return jobs
