"""The embedding operation: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.embedding import kernel, plain
from twinfer.kernels.operation import Case, CompileJob, Example, Operation


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, V rows, h columns, `fed` tokens that come from the feed."""
    num_tokens, vocab_size, hidden, fed = case["T"], case["V"], case["h"], case["fed"]
    device = generator.device
    ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator, device=device, dtype=torch.int32)
    feed = torch.randint(0, vocab_size, (max(1, num_tokens),), generator=generator, device=device, dtype=torch.int32)
    order = torch.randperm(num_tokens, generator=generator, device=device)[:fed]
    ids[order] = -(order.to(torch.int32) + 1)
    weight = torch.randn(vocab_size, hidden, generator=generator, device=device).to(dtype)
    out = torch.full((num_tokens, hidden), torch.nan, device=device, dtype=dtype)
    return Example({"token_ids": ids, "feed": feed, "weight": weight, "out": out})


EMBEDDING = Operation(
    name="embedding",
    plain=plain.embedding,
    triton=kernel.embedding,
    make=make,
    cases=({"T": 1, "V": 5, "h": 64, "fed": 0}, {"T": 7, "V": 300, "h": 96, "fed": 3}, {"T": 3, "V": 9, "h": 1536, "fed": 3}),
    large=({"T": 8192, "V": 151936, "h": 4096, "fed": 256}, {"T": 1, "V": 600_000, "h": 4096, "fed": 0}),
    tolerance={"float32": 0.0, "float16": 0.0, "bfloat16": 0.0},
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each dtype, the same on every device."""
    return [
        CompileJob(kernel.embedding_kernel, {"TOKEN_IDS": "*i32", "FEED": "*i32", "WEIGHT": t, "OUT": t, "h": "i32"}, {"BLOCK": 1024}, 4, 3, ("h",))
        for t in ("*bf16", "*fp16", "*fp32")
    ]
