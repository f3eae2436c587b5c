"""The attention operation: both forms, its inputs, its tolerance, and what the compile gate compiles."""

from __future__ import annotations

import numpy as np
import torch

from twinfer.kernels.attention import kernel, plain
from twinfer.kernels.attention.tasks import count_tasks, plan_tasks
from twinfer.kernels.attention.tiles import DECODE, HEAD_DIMS, Tile, decode_tile, shared_bound, tile_tokens
from twinfer.kernels.attention.tiles import tile as tile_of
from twinfer.kernels.operation import Case, CompileJob, Example, Operation


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: rows ((tokens, context), ..), K kv heads, G query heads each, d, page (its size), and where not the default: window 0, spread False,
    programs (of a kv head; one a task), tile (the table's on a GPU; 16 rows in the interpreter). Pages lie in random order; every key that no query sees
    is NaN, and so is page 0, which the page table names wherever it names no page of the row.
    """
    device = generator.device
    rows, num_kv_heads, group, head_dim, page_size = case["rows"], case["K"], case["G"], case["d"], case["page"]
    window, spread = case.get("window", 0), case.get("spread", False)
    if "tile" in case:
        tile = Tile(*case["tile"])
    elif device.type == "cuda":
        tile = tile_of(torch.cuda.get_device_capability(device), spread, str(dtype).removeprefix("torch."), head_dim, group)
    else:
        tile = Tile(16, 4, 1)
    lengths, contexts = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    num_heads, num_tokens, num_rows = num_kv_heads * group, int(lengths.sum()), len(rows)

    number = -(-contexts // page_size)  # pages of each row
    ids = torch.randperm(int(number.sum()), generator=generator, device=device).to(torch.int32) + 1
    page_table = torch.zeros(num_rows + 1, int(number.max()) + 1, dtype=torch.int32, device=device)
    slots = (torch.randperm(num_rows + 1, generator=generator, device=device)[:num_rows]).to(torch.int32)
    stored = []
    for _ in range(2):
        storage = torch.full((len(ids) + 1, num_kv_heads, page_size, head_dim), torch.nan, dtype=dtype, device=device)
        stored.append(storage.transpose(1, 2))  # [pages, page_size, K, d]
    for row, (length, seen) in enumerate(rows):
        own = ids[int(number[:row].sum()) :][: int(number[row])]
        page_table[int(slots[row]), : len(own)] = own
        first = max(0, seen - length - window + 1) if window else 0
        at = torch.arange(first, seen, device=device)
        for cache in stored:
            fresh = torch.randn(seen - first, num_kv_heads, head_dim, generator=generator, device=device).to(dtype)
            cache[own.long()[at // page_size], at % page_size] = fresh
    # Gain 1.5: scores of +-5 at any head_dim, a softmax that is neither flat nor one key's.
    q = (1.5 * torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=device)).to(dtype)

    number_of_tasks, places = count_tasks(lengths, contexts, tile_tokens(tile, group), spread)
    tasks = np.full((number_of_tasks + 3, 4), np.iinfo(np.int32).min, np.int32)
    plan_tasks(lengths, contexts, tile_tokens(tile, group), spread, tasks, places)
    partials = {
        "partial_acc": torch.full((places, num_heads, head_dim), torch.nan, device=device),
        "partial_m": torch.full((places, num_heads), torch.nan, device=device),
        "partial_den": torch.full((places, num_heads), torch.nan, device=device),
    }
    return Example(
        {
            "q": q,
            "keys": stored[0],
            "values": stored[1],
            "page_table": page_table,
            "slots": slots,
            "row_indptr": torch.tensor([0, *lengths.cumsum()], dtype=torch.int32, device=device),
            "context": torch.tensor(contexts, dtype=torch.int32, device=device),
            "tasks": torch.tensor(tasks, device=device),
            "num_tasks": torch.tensor([number_of_tasks], dtype=torch.int32, device=device),
            "out": torch.full_like(q, torch.nan),
            "arrived": torch.zeros(places, num_kv_heads, dtype=torch.int32, device=device),
            **partials,
        },
        {
            "scale": head_dim**-0.5,
            "window": window,
            "spread": spread,
            "tile": tile,
            "num_programs": case.get("programs", number_of_tasks),
        },
        workspace=tuple(partials),  # the counters come out as they went in: at zero
    )


_MIXED = ((1, 300), (7, 7), (1, 1), (9, 262))
_LONG = ((1, 8192), (1, 5000), (1000, 3333), (16, 2049), (700, 700), (1, 1))

ATTENTION = Operation(
    name="attention",
    plain=plain.attention,
    triton=kernel.attention,
    make=make,
    cases=(
        {"rows": ((1, 300),), "K": 1, "G": 4, "d": 64, "page": 64, "spread": True},
        {"rows": _MIXED, "K": 2, "G": 2, "d": 64, "page": 16, "spread": True, "programs": 5},
        {"rows": _MIXED, "K": 2, "G": 2, "d": 64, "page": 16, "programs": 3},
        {"rows": ((1, 300), (9, 262)), "K": 1, "G": 5, "d": 64, "page": 48, "window": 30},
        {"rows": ((1, 600), (2, 300)), "K": 1, "G": 5, "d": 64, "page": 48, "window": 270, "spread": True},
        {"rows": ((5, 261), (1, 65)), "K": 2, "G": 1, "d": 64, "page": 1, "spread": True},
        {"rows": ((33, 90),), "K": 1, "G": 8, "d": 128, "page": 256, "tile": (32, 8, 2)},
        {"rows": ((2, 100), (1, 64)), "K": 1, "G": 4, "d": 256, "page": 96},
    ),
    large=(
        {"rows": _LONG, "K": 8, "G": 4, "d": 128, "page": 64},
        {"rows": _LONG, "K": 8, "G": 4, "d": 128, "page": 16, "spread": True, "programs": 100},
        {"rows": _LONG, "K": 8, "G": 2, "d": 128, "page": 64, "window": 1000, "spread": True},
        {"rows": _LONG, "K": 2, "G": 5, "d": 64, "page": 1, "window": 1000},
    ),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU. The kernel's: 6.8e-7, 4.6e-4 (interpreter).
    tolerance={"float32": 3e-6, "float16": 1.2e-3, "bfloat16": 8e-3},  # 8.9e-7, 6.0e-4, 4.0e-3
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each table entry of a device and dtype, with group 4 and page 64; pages of 16 and a window, other paths of the kernel, with d 128 in bf16."""
    jobs: list[CompileJob] = []
    integers = ("PAGE_TABLE", "SLOTS", "ROW_INDPTR", "CONTEXT", "TASKS", "NUM_TASKS")
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        signature = {
            **dict.fromkeys(("Q", "KEYS", "VALUES"), f"*{short}"),
            **dict.fromkeys(integers, "*i32"),
            **dict.fromkeys(("PARTIAL_ACC", "PARTIAL_M", "PARTIAL_DEN"), "*fp32"),
            "ARRIVED": "*i32",
            "OUT": f"*{short}",
            "width": "i32",
            "c": "fp32",
        }
        name = str(dtype).removeprefix("torch.")
        for d in HEAD_DIMS:
            entries = [(spread, tile_of(capability, spread, name, d, 4)) for spread in (True, False)]
            entries += [(False, decode_tile(capability, name, d, 4, least)) for least, _ in DECODE]
            for spread, tile in dict.fromkeys(entries):
                variants = ((64, 0), (16, 0), (64, 1024)) if d == 128 and dtype == torch.bfloat16 else ((64, 0),)
                for page, window in variants:
                    sizes = kernel.constants(tile, spread, window, dtype, 8, 4, d, page, (8 * page * d, d, page * d))
                    claims = {"async"} if tile.stages > 1 else set()
                    if dtype != torch.float32:
                        claims |= {"mma", "wgmma"} if capability == (9, 0) and tile.rows >= 64 else {"mma"}
                    most = shared_bound(tile, capability, dtype.itemsize, d)
                    jobs.append(
                        CompileJob(kernel.attention_kernel, signature, sizes, tile.warps, tile.stages, claims=frozenset(claims), shared=most)
                    )
    return jobs
