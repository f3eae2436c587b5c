"""The SwiGLU operation: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.swiglu import kernel, plain


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, I columns a half, `scale` of the gates: at 100, exp(-gate) passes the range of float32."""
    num_tokens, width = case["T"], case["I"]
    gate_up = torch.randn(num_tokens, 2 * width, generator=generator, device=generator.device)
    gate_up[:, :width] *= case.get("scale", 1.0)
    out = torch.full((num_tokens, width), torch.nan, dtype=dtype, device=generator.device)
    return Example({"gate_up": gate_up.to(dtype), "out": out})


SWIGLU = Operation(
    name="swiglu",
    plain=plain.swiglu,
    triton=kernel.swiglu,
    make=make,
    cases=({"T": 1, "I": 64}, {"T": 5, "I": 100}, {"T": 2, "I": 3072}, {"T": 2, "I": 1025}, {"T": 3, "I": 96, "scale": 100.0}),
    large=({"T": 8192, "I": 12288},),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU.
    tolerance={"float32": 3e-7, "float16": 1e-3, "bfloat16": 8e-3},  # 8.7e-8, 5.0e-4, 4.2e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each dtype, the same on every device."""
    return [
        CompileJob(kernel.swiglu_kernel, {"GATE_UP": t, "OUT": t, "I": "i32"}, {"BLOCK": kernel.BLOCK}, kernel.WARPS, 3, ("I",))
        for t in ("*bf16", "*fp16", "*fp32")
    ]
