"""The operation of QK norm, rotary embedding and cache write: both forms, its inputs, its tolerance, and the kernels that serving compiles."""

from __future__ import annotations

from typing import Any

import torch

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.rope import kernel, plain
from twinfer.kernels.rope.tiles import HEAD_DIMS, head_tile


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, H query heads, K key-value heads, d head_dim, `pages` pages of `page` slots.

    norm: whether there are weights; centred: by which 1 is added. gated: a gate lies behind each query. rotary: dims that turn (default: all).
    by_head: the cache lies in memory as [pages, K, page, d]. wide_table: the table is stored in float32.
    Positions no token has are NaN in the table, as is the cache before the call; cos and sin are random: nothing may rest on their being such.
    """
    num_tokens, heads, kv_heads, head_dim, page_size = case["T"], case["H"], case["K"], case["d"], case["page"]
    device = generator.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def unwritten(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    positions = torch.randint(0, 50, (num_tokens,), generator=generator, device=device, dtype=torch.int32)
    rotary, queries = case.get("rotary", head_dim), (2 if case.get("gated") else 1) * heads
    table = torch.full((51, 2, rotary), torch.nan, dtype=torch.float32 if case["wide_table"] else dtype, device=device)
    table[positions.long()] = random(51, 2, rotary).to(table.dtype)[positions.long()]
    if case["by_head"]:
        keys, values = (unwritten(case["pages"], kv_heads, page_size, head_dim).transpose(1, 2) for _ in range(2))
    else:
        keys, values = (unwritten(case["pages"], page_size, kv_heads, head_dim) for _ in range(2))
    tensors = {
        "qkv": random(num_tokens, (queries + 2 * kv_heads) * head_dim),
        "positions": positions,
        "write_slots": torch.randperm(case["pages"] * page_size, generator=generator, device=device)[:num_tokens],
        "rope_table": table,
        "q": unwritten(num_tokens, heads, head_dim),
        "keys": keys,
        "values": values,
    }
    constants: dict[str, Any] = {"eps": 1e-6, "centred": case.get("centred", False)}
    weights = {"q_weight": random(head_dim), "k_weight": random(head_dim)}
    if case["norm"]:
        tensors |= weights
    else:
        constants |= dict.fromkeys(weights)
    return Example(tensors, constants, outputs=("q", "keys", "values"))


def _case(**changes: int | bool) -> Case:
    return {"T": 3, "H": 4, "K": 2, "d": 64, "pages": 4, "page": 16, "norm": True, "by_head": True, "wide_table": False, **changes}


QK_NORM_ROPE_WRITE = Operation(
    name="qk_norm_rope_write",
    plain=plain.qk_norm_rope_write,
    triton=kernel.qk_norm_rope_write,
    make=make,
    cases=(
        _case(T=1),
        _case(T=5, wide_table=True),
        _case(H=9, K=3, d=128, page=1, pages=7),
        _case(H=5, K=5, d=256, by_head=False),
        _case(H=40, K=8, d=128, page=256, pages=2),
        _case(norm=False, H=17, K=1),
        _case(d=16, by_head=False, page=4),
        _case(H=8, K=1, d=256, rotary=64, gated=True, centred=True),
        _case(H=5, K=2, rotary=24, gated=True, wide_table=True),
        _case(H=3, K=3, d=128, rotary=64, norm=False),
        _case(H=4, K=2, d=128, centred=True),
    ),
    large=(
        _case(T=8192, H=32, K=8, d=128, pages=1024),
        _case(T=256, H=16, K=8, d=128, pages=512),
        _case(T=7, H=64, K=8, d=256, page=64, pages=9),
        _case(T=300, H=16, K=2, d=256, page=64, pages=9, rotary=64, gated=True, centred=True),
    ),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases and outputs, on a CPU.
    tolerance={"float32": 4e-7, "float16": 1.5e-3, "bfloat16": 1.2e-2},  # 1.7e-7, 1.1e-3, 8.3e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each head_dim and dtype, with norm and without, and as the hybrid types have it: gated, a quarter turns, weights by which 1 is added.

    The same on every device. H, K and page_size may or may not be multiples of 16.
    """
    integers = ("k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "H", "K", "page_size")
    jobs: list[CompileJob] = []
    for head_dim in HEAD_DIMS:
        heads, warps = head_tile(head_dim)
        for t in ("*bf16", "*fp16", "*fp32"):
            signature = {"QKV": t, "POSITIONS": "*i32", "WRITE_SLOTS": "*i64", "TABLE": t, "Q": t, "KEYS": t, "VALUES": t}
            signature |= dict.fromkeys(integers, "i32") | {"eps": "fp32"}
            dense = {"D": head_dim, "HEADS": heads, "ROTARY": head_dim, "Q_STEP": 1, "CENTRED": False}
            hybrid = dense | {"ROTARY": head_dim // 4, "Q_STEP": 2, "CENTRED": True}
            weights = {"Q_WEIGHT": t, "K_WEIGHT": t}
            for types, constants in ((signature | weights, dense), (signature | weights, hybrid), (signature, dense | dict.fromkeys(weights))):
                jobs.append(CompileJob(kernel.qk_norm_rope_write_kernel, types, constants, warps, 3, integers[:6], {"enable_fp_fusion": False}))
    return jobs
