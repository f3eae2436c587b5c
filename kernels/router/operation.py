"""The router's operations: both forms of each, their inputs, their tolerances, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.router import kernel, plain

# (E, k): Qwen3-30B-A3B, Qwen3.5 and 3.6, Qwen3-Next, the golden checkpoints.
CHOICES = ((128, 8), (256, 8), (512, 10), (8, 3))
ROWS = (16, 32, 64, 128)  # pairs of a tile: what the tables of kernels/experts ask for


def make_route(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: T tokens, E experts, k; `normalise`; `padding`: tokens that are, with logits that are NaN; `values`: logits take that many values, so that
    experts tie; `spread` of the logits, so large that probabilities vanish; `broken`: token 0 has a logit that is NaN, token 1 one that is infinite."""
    num_tokens, num_experts, k = case["T"], case["E"], case["k"]
    device = generator.device
    logits = case.get("spread", 2.0) * torch.randn(num_tokens, num_experts, generator=generator, device=device)
    if values := case.get("values"):
        logits = torch.randint(values, logits.shape, generator=generator, device=device) / values
    if case.get("broken"):
        logits[0, num_experts // 2], logits[1, num_experts // 3] = torch.nan, torch.inf
    token_row = torch.arange(num_tokens, dtype=torch.int32, device=device) % 7
    padding = list(case.get("padding", ()))
    token_row[padding] = -1
    logits[padding] = torch.nan
    return Example(
        {
            "logits": logits.to(dtype),
            "token_row": token_row,
            "shares": torch.full((num_tokens, k), torch.nan, dtype=dtype, device=device),
            "experts": torch.full((num_tokens, k), torch.iinfo(torch.int32).min, dtype=torch.int32, device=device),
        },
        {"normalise": case["normalise"]},
        outputs=("shares", "experts"),
    )


def random_experts(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[T, k] int32 as `route` writes them. case: T, E, k; `padding`; `crowd`: all choose among the first that many experts (at least k)."""
    num_tokens, k, device = case["T"], case["k"], generator.device
    among = case.get("crowd", case["E"])
    chosen = torch.rand(num_tokens, among, generator=generator, device=device).argsort(-1)[:, :k].sort(-1).values
    chosen[list(case.get("padding", ()))] = -1
    return chosen.to(torch.int32)


def unlisted(num_pairs: int, num_experts: int, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What `group` writes to, not written yet."""
    shapes = {"pairs": (num_pairs,), "offsets": (num_experts + 1,), "tiles": (plain.max_tiles(num_pairs, num_experts, rows), 3), "num_tiles": (1,)}
    return {name: torch.full(shape, torch.iinfo(torch.int32).min, dtype=torch.int32, device=device) for name, shape in shapes.items()}


def make_group(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: as `random_experts`, and the `rows` of a tile."""
    experts = random_experts(case, generator)
    lists = unlisted(experts.numel(), case["E"], case["rows"], generator.device)
    return Example({"experts": experts, **lists}, {"rows": case["rows"]}, outputs=tuple(lists))


ROUTE = Operation(
    name="route",
    plain=plain.route,
    triton=kernel.route,
    make=make_route,
    cases=(
        {"T": 1, "E": 8, "k": 3, "normalise": True},
        {"T": 5, "E": 100, "k": 16, "normalise": True, "padding": (0, 3)},
        {"T": 4, "E": 256, "k": 8, "normalise": False, "values": 5},
        {"T": 3, "E": 6, "k": 6, "normalise": False, "values": 2},
        {"T": 3, "E": 512, "k": 10, "normalise": True, "spread": 60.0},
        {"T": 3, "E": 20, "k": 4, "normalise": True, "broken": True},
        {"T": 2, "E": 1, "k": 1, "normalise": True, "padding": (0, 1)},
    ),
    large=({"T": 8192, "E": 256, "k": 8, "normalise": True, "values": 1000}, {"T": 300, "E": 512, "k": 10, "normalise": True}),
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases, on a CPU.
    tolerance={"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3},  # 1.3e-7, 2.9e-4, 2.6e-3
)
GROUP = Operation(
    name="group",
    plain=plain.group,
    triton=kernel.group,
    make=make_group,
    cases=(
        {"T": 1, "E": 8, "k": 3, "rows": 16},
        {"T": 33, "E": 8, "k": 3, "rows": 16, "padding": (0, 5, 32)},
        {"T": 40, "E": 20, "k": 1, "rows": 16, "crowd": 1},
        {"T": 4, "E": 6, "k": 6, "rows": 32},
        {"T": 3, "E": 100, "k": 4, "rows": 16, "padding": (0, 1, 2)},
        {"T": 130, "E": 7, "k": 4, "rows": 64, "padding": (4,)},
        {"T": 90, "E": 5, "k": 3, "rows": 16, "crowd": 3},
    ),
    large=(
        *({"T": t, "E": e, "k": 8, "rows": r} for t, e, r in ((8192, 256, 128), (8192, 512, 64), (64, 128, 16), (1, 256, 16))),
        {"T": 8192, "E": 256, "k": 8, "rows": 128, "crowd": 8},
    ),
    tolerance={"float32": 0.0},  # integers; the dtype is nothing's
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One of `route` for each dtype and model, of the lists for each number of experts and rows of a tile; the same on every device."""
    jobs: list[CompileJob] = []
    lists = dict.fromkeys(("PAIRS", "OFFSETS", "TILES", "NUM_TILES"), "*i32")
    for num_experts, k in CHOICES:
        whole = ("E",) if num_experts % 16 == 0 else ()
        block = 1 << (num_experts - 1).bit_length()
        for t in ("*bf16", "*fp16", "*fp32"):
            types = {"LOGITS": t, "TOKEN_ROW": "*i32", "SHARES": t, "EXPERTS": "*i32", "stride": "i32", "E": "i32"}
            sizes = {"k": k, "NORMALISE": True, "BLOCK": block}
            jobs.append(CompileJob(kernel.route_kernel, types, sizes, kernel.WARPS, 3, ("stride", *whole)))
        expert_block = 1 << num_experts.bit_length()
        for rows in ROWS:
            types = {"EXPERTS": "*i32", **lists, "P": "i32", "E": "i32"}
            few = {"ROWS": rows, "PAIR_BLOCK": kernel.FEW, "EXPERT_BLOCK": expert_block, "CHUNK": kernel.CHUNK}
            jobs.append(CompileJob(kernel.group_few_kernel, types, few, kernel.LIST_WARPS, 3, whole))
            own = {name: types[name] for name in ("OFFSETS", "TILES", "NUM_TILES", "E")}
            jobs.append(CompileJob(kernel.list_kernel, own, {"ROWS": rows, "EXPERT_BLOCK": expert_block}, kernel.LIST_WARPS, 3, whole))
        types = {"EXPERTS": "*i32", "PAIRS": "*i32", "OFFSETS": "*i32", "P": "i32", "E": "i32"}
        jobs.append(CompileJob(kernel.sort_kernel, types, {"BLOCK": kernel.BLOCK}, kernel.SORT_WARPS, 3, whole))
    return jobs
