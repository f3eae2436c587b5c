"""The operations on a Gated DeltaNet layer's inputs: both forms, their inputs, their tolerances, and the kernels that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.gdn_inputs import kernel, plain
from twinfer.kernels.gdn_inputs.tiles import BLOCK, HEAD_DIMS, WARPS, head_tile
from twinfer.kernels.operation import Case, CompileJob, Example, Operation


def _step(case: Case, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of a step. case: rows ((tokens, start), ..), nk, nv, dk, dv, K taps; `padding` tokens and as many rows behind them; `gap` elements behind each
    token of projected. Whatever no call may read is NaN: inputs before position 0, slots of nobody. Padding has numbers, so that a result of it is seen."""
    rows, padding, device = case["rows"], case.get("padding", 0), generator.device
    channels = 2 * case["nk"] * case["dk"] + case["nv"] * case["dv"]
    width, kept = channels + case["nv"] * (case["dv"] + 2), case["K"] - 1
    lengths = [length for length, _ in rows]
    num_tokens, num_rows = sum(lengths) + padding, len(rows) + padding

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    projected = torch.full((num_tokens, width + case.get("gap", 0)), torch.nan, dtype=dtype, device=device)[:, :width]
    projected.copy_(random(num_tokens, width))
    histories = torch.full((num_rows + 2, kept, channels), torch.nan, dtype=dtype, device=device)
    slots = torch.randperm(num_rows + 2, generator=generator, device=device)[: len(rows)].to(torch.int32)
    for (_, start), slot in zip(rows, slots.tolist(), strict=True):
        there = min(start, kept)
        histories[slot, kept - there :] = random(there, channels)
    indptr = [0]
    for length in lengths + [1] * padding:
        indptr.append(indptr[-1] + length)
    return {
        "projected": projected,
        "histories": histories,
        "positions": integers([start + i for length, start in rows for i in range(length)] + [0] * padding),
        "token_row": integers([row for row, length in enumerate(lengths) for _ in range(length)] + [-1] * padding),
        "state_slot": torch.cat((slots, integers([-1] * padding))),
        "row_indptr": integers(indptr),
        "context": integers([start + length for length, start in rows] + [1] * padding),
    }


def make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """As `_step`; `wide_gates`: A_log and dt_bias are float32, as some files keep them."""
    step, device = _step(case, dtype, generator), generator.device
    channels, num_tokens = step["histories"].shape[2], len(step["projected"])
    gates = torch.float32 if case.get("wide_gates") else dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def unwritten(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=of, device=device)

    del step["row_indptr"], step["context"]
    tensors = {
        **step,
        "conv_weight": random(channels, case["K"]).to(dtype),
        "a_log": random(case["nv"]).to(gates),
        "dt_bias": (3 * random(case["nv"])).to(gates),  # softplus over its whole range
        "q": unwritten(num_tokens, case["nk"], case["dk"]),
        "k": unwritten(num_tokens, case["nk"], case["dk"]),
        "v": unwritten(num_tokens, case["nv"], case["dv"]),
        "log_decay": unwritten(num_tokens, case["nv"], of=torch.float32),
        "beta": unwritten(num_tokens, case["nv"], of=torch.float32),
    }
    return Example(tensors, outputs=("q", "k", "v", "log_decay", "beta"))


def make_histories(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """As `_step`."""
    step = _step(case, dtype, generator)
    del step["positions"], step["token_row"]
    return Example(step, outputs=("histories",))


def _case(*rows: tuple[int, int], **changes: int | bool) -> Case:
    return {"rows": rows, "nk": 2, "nv": 4, "dk": 32, "dv": 16, "K": 4, **changes}


_CASES = (
    _case((1, 0)),
    _case((1, 5), (1, 1), (1, 2), padding=2, gap=16),
    _case((5, 0), (2, 1), (3, 64), (1, 3), padding=1, wide_gates=True),
    _case((2, 2), (4, 7), nk=1, nv=4, dk=16, K=2),
    _case((3, 2), (1, 9), nk=3, nv=3, dk=64, dv=256, K=3, gap=8),
    _case((2, 0), (1, 4), nk=17, nv=17, dk=128, dv=128, K=5),
)
_LARGE = (_case((200, 0), (1, 77), (1, 0), (5, 640), nk=16, nv=32, dk=128, dv=128, padding=3),)

GDN_INPUTS = Operation(
    name="gdn_inputs",
    plain=plain.gdn_inputs,
    triton=kernel.gdn_inputs,
    make=make_inputs,
    cases=_CASES,
    large=_LARGE,
    # Beside: the distance of the plain form in that dtype from float64, the largest of all cases and outputs, on a CPU; the kernel's is the same.
    tolerance={"float32": 5e-7, "float16": 1.2e-3, "bfloat16": 1e-2},  # 1.6e-7, 6.2e-4, 5.3e-3
)
WRITE_HISTORIES = Operation(
    name="write_histories",
    plain=plain.write_histories,
    triton=kernel.write_histories,
    make=make_histories,
    cases=_CASES,
    large=_LARGE,
    tolerance={"float32": 0.0, "float16": 0.0, "bfloat16": 0.0},
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One for each head_dim and dtype, the same on every device: 16 key heads and 32 value heads, A_log in float32 and in the dtype."""
    jobs: list[CompileJob] = []
    integers = {"stride": "i32", "C": "i32"}
    for t in ("*bf16", "*fp16", "*fp32"):
        for head_dim in HEAD_DIMS:
            names = ("PROJECTED", "WEIGHT", "HISTORIES", "Q", "K", "V", "DT_BIAS")
            types = {**dict.fromkeys(names, t), **dict.fromkeys(("POSITIONS", "TOKEN_ROW", "STATE_SLOT"), "*i32"), **integers}
            types |= dict.fromkeys(("LOG_DECAY", "BETA"), "*fp32") | {"A_LOG": "*fp32" if head_dim == 128 else t, "scale": "fp32", "eps": "fp32"}
            sizes = {"NK": 16, "NV": 32, "NVP": 32, "DK": head_dim, "DV": head_dim, "TAPS": 4, "HEADS": head_tile(head_dim), "BLOCK": BLOCK}
            jobs.append(CompileJob(kernel.gdn_inputs_kernel, types, sizes, WARPS, 3, tuple(integers), {"enable_fp_fusion": False}))
        types = {"PROJECTED": t, **dict.fromkeys(("ROW_INDPTR", "CONTEXT", "STATE_SLOT"), "*i32"), "HISTORIES": t, **integers}
        jobs.append(CompileJob(kernel.write_histories_kernel, types, {"KEPT": 3, "PLACES": 4, "BLOCK": BLOCK}, WARPS, 3, tuple(integers)))
    return jobs
