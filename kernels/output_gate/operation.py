"""The output gate operation: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.output_gate import kernel, plain


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, H query heads, K key-value heads, d head_dim, `scale` of the gates: at 100, exp(-gate) passes the range of float32."""
    num_tokens, heads, kv_heads, head_dim = case["T"], case["H"], case["K"], case["d"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    qkv = torch.full((num_tokens, 2 * heads + 2 * kv_heads, head_dim), torch.nan, device=generator.device)  # all but the gates is never read
    qkv[:, 1 : 2 * heads : 2] = case.get("scale", 1.0) * random(num_tokens, heads, head_dim)
    attended = random(num_tokens, heads, head_dim)
    return Example({"qkv": qkv.flatten(1).to(dtype), "attended": attended.to(dtype)}, outputs=("attended",))


OUTPUT_GATE = Operation(
    name="output_gate",
    plain=plain.output_gate,
    triton=kernel.output_gate,
    make=make,
    cases=(
        {"T": 1, "H": 4, "K": 2, "d": 64},
        {"T": 5, "H": 3, "K": 1, "d": 16},
        {"T": 2, "H": 9, "K": 3, "d": 128},
        {"T": 3, "H": 16, "K": 2, "d": 256},
        {"T": 3, "H": 2, "K": 2, "d": 32, "scale": 100.0},
    ),
    large=({"T": 8192, "H": 16, "K": 2, "d": 256},),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU.
    tolerance={"float32": 3e-7, "float16": 1e-3, "bfloat16": 8e-3},  # 8.6e-8, 5.0e-4, 3.9e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each head_dim and dtype, the same on every device."""
    types = {"stride": "i32", "H": "i32"}
    return [
        CompileJob(kernel.output_gate_kernel, {"QKV": t, "ATTENDED": t, **types}, {"D": d, "BLOCK": kernel.BLOCK}, kernel.WARPS, 3, ("stride",))
        for d in (64, 128, 256)
        for t in ("*bf16", "*fp16", "*fp32")
    ]
