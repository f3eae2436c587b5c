"""The gated norm: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.gated_norm import kernel, plain
from twinfer.kernels.gated_norm.tiles import HEAD_DIMS, WARPS, head_tile
from twinfer.kernels.operation import Case, CompileJob, Example, Operation


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, H heads of d; the gate begins `before` elements into rows of a wider tensor. wide_weight: the weight is float32. scale: of x, so small
    that eps counts or so large that its squares pass float16."""
    num_tokens, heads, head_dim, before, device = case["T"], case["H"], case["d"], case.get("before", 16), generator.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    projected = torch.full((num_tokens, heads * head_dim + before + 8), torch.nan, dtype=dtype, device=device)
    gate = projected[:, before : before + heads * head_dim]
    gate.copy_(3 * random(num_tokens, heads * head_dim))
    tensors = {
        "x": (case.get("scale", 1.0) * random(num_tokens, heads, head_dim)).to(dtype),
        "gate": gate,
        "weight": random(head_dim).to(torch.float32 if case.get("wide_weight") else dtype),
        "out": torch.full((num_tokens, heads * head_dim), torch.nan, dtype=dtype, device=device),
    }
    return Example(tensors, {"eps": 1e-6})


GATED_RMS_NORM = Operation(
    name="gated_rms_norm",
    plain=plain.gated_rms_norm,
    triton=kernel.gated_rms_norm,
    make=make,
    cases=(
        {"T": 1, "H": 4, "d": 16, "wide_weight": True},
        {"T": 3, "H": 9, "d": 128},
        {"T": 2, "H": 5, "d": 256, "wide_weight": True, "before": 0},
        {"T": 3, "H": 33, "d": 32, "scale": 1e-3},
        {"T": 2, "H": 3, "d": 64, "scale": 1000.0},
    ),
    large=({"T": 8192, "H": 32, "d": 128, "wide_weight": True, "before": 8192}, {"T": 256, "H": 64, "d": 128}),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU; the kernel's is the same.
    tolerance={"float32": 5e-7, "float16": 1.5e-3, "bfloat16": 1.2e-2},  # 1.5e-7, 6.8e-4, 5.8e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each head_dim, dtype and dtype of the weight, the same on every device."""
    jobs: list[CompileJob] = []
    for head_dim in HEAD_DIMS:
        for t in ("*bf16", "*fp16", "*fp32"):
            for weight in dict.fromkeys((t, "*fp32")):
                types = {"X": t, "GATE": t, "WEIGHT": weight, "OUT": t, "stride": "i32", "H": "i32", "eps": "fp32"}
                sizes = {"D": head_dim, "HEADS": head_tile(head_dim)}
                jobs.append(CompileJob(kernel.gated_rms_norm_kernel, types, sizes, WARPS, 3, ("stride", "H"), {"enable_fp_fusion": False}))
    return jobs
