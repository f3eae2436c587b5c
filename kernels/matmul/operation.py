"""The matmul operation: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.matmul import kernel, plain
from twinfer.kernels.matmul.tiles import entries, family
from twinfer.kernels.operation import Case, CompileJob, Example, Operation


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: M tokens, N weight rows, K; with `bias`, and with `wide` an `out` in float32."""
    m, n, k, device = case["M"], case["N"], case["K"], generator.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    tensors = {
        "x": random(m, k),
        "weight": random(n, k),
        "out": torch.full((m, n), torch.nan, dtype=torch.float32 if case.get("wide") else dtype, device=device),
    }
    return Example(tensors | ({"bias": random(n)} if case.get("bias") else {}))


MATMUL = Operation(
    name="matmul",
    plain=plain.matmul,
    triton=kernel.matmul,
    make=make,
    cases=(
        {"M": 1, "N": 128, "K": 64},
        {"M": 5, "N": 100, "K": 96, "bias": True},
        {"M": 65, "N": 130, "K": 200},
        {"M": 3, "N": 257, "K": 1024, "wide": True},
        {"M": 17, "N": 33, "K": 7, "bias": True, "wide": True},
    ),
    large=(
        *({"M": m, "N": 6144, "K": 4096} for m in (1, 16, 17, 64, 65, 128, 200, 257, 5000)),
        {"M": 1, "N": 1024, "K": 3072, "bias": True},
        {"M": 100, "N": 4096, "K": 12288},
        {"M": 300, "N": 5120, "K": 8192, "bias": True},
        {"M": 9, "N": 151936, "K": 4096, "wide": True},
    ),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU. On an H200 the plain form itself is 2.6e-6 away
    # in float32 at K = 4096 (M = 9, N = 151936), and sums grow with K, here to 12288; TF32 would be 3e-4.
    tolerance={"float32": 1e-5, "float16": 6e-4, "bfloat16": 5e-3},  # 5.1e-7, 3.3e-4, 3.3e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each table entry of a device and dtype. BIAS and OUT in float32 change an epilogue and are compiled with the first entry alone."""
    jobs: list[CompileJob] = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for i, tile in enumerate(entries(family(capability), dtype)):
            x, w = (f"tensordesc<{name}[{rows}, {tile.bk}]>" if tile.tma else f"*{name}" for rows in (tile.bm, tile.bn))
            signature = {"X": x, "W": w, "OUT": f"*{name}", "M": "i32", "N": "i32", "K": "i32"}
            sizes = kernel.constants(tile, k=tile.bk)
            claims = {"tma", "async"} if tile.tma else {"async"} if tile.stages > 1 else set()
            if dtype != torch.float32:
                claims |= {"mma", "wgmma"} if capability == (9, 0) and (tile.bn if tile.swap else tile.bm) >= 64 else {"mma"}
            bytes_ = tile.shared_bytes(dtype.itemsize)
            forms = [(signature, sizes | {"BIAS": None})]
            if i == 0:
                forms.append((signature | {"BIAS": f"*{name}", "OUT": "*fp32"}, sizes))
            jobs += [CompileJob(kernel.matmul_kernel, *form, tile.warps, tile.stages, ("N", "K"), claims=frozenset(claims), shared=bytes_) for form in forms]
    return jobs
