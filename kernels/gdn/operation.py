"""Gated DeltaNet's kernels as serving compiles them. Not an Operation: its state goes in and comes out, and tests/kernels/test_gdn.py has checks of its own."""

from __future__ import annotations

from typing import Any

import torch

from twinfer.kernels.attention.tiles import shared_limit
from twinfer.kernels.gdn import chunks, singles
from twinfer.kernels.gdn.state import precision_of
from twinfer.kernels.gdn.tiles import ROUNDS, CommitTile, LongTile, SingleTile, commit_tile, long_tile, single_tile
from twinfer.kernels.operation import CompileJob

# (key heads, value heads, dk, dv): the models' and the tiny hybrid checkpoint's.
SHAPES = ((16, 32, 128, 128), (2, 4, 32, 16))
_OPTIONS = {"enable_fp_fusion": False}
_ROWS = (1, 8, 128)  # numbers of single rows whose tiles differ


def _job(function: Any, t: str, sizes: dict[str, Any], warps: int, stages: int, mma: bool) -> CompileJob:
    """Pointers by the kernels' names: lists in int32, sums and the anchor in fp32, the rest in the model's dtype."""
    wide = {"LOG_DECAY", "BETA", "STATE_SUMS", "STATE_BETA", "SUMS", "STRENGTH", "DIAGONAL", "ANCHOR", "W", "STREAMED"}
    lists = {"TASKS", "LONGS", "SINGLES", "COMMITS", "COUNTS"}
    types = {name: "*i32" if name in lists else "*fp32" if name in wide else t for name in function.arg_names if name not in sizes}
    return CompileJob(function, types, sizes, warps, stages, (), _OPTIONS, frozenset({"mma"} if mma else ()))


def jobs_for(t: str, shape: tuple[int, int, int, int], exact: bool, long: LongTile, single: SingleTile, commit: CommitTile) -> list[CompileJob]:
    """Every kernel in one dtype ("bf16"), shape and set of tiles; of single rows the launches that `single` asks for."""
    nk, nv, dk, dv = shape
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[t]
    precision, mma = precision_of(dtype, exact), dtype != torch.float32
    sp: dict[str, Any] = {"SP": precision.pieces}
    ss: dict[str, Any] = {**sp, "SS": precision.anchor_pieces}
    keys, heads = {"NK": nk, "DK": dk}, {"NK": nk, "NV": nv, "DK": dk, "DV": dv}
    jobs = [
        _job(chunks.decay_sums_kernel, f"*{t}", {"NV": nv, "NVP": 1 << (nv - 1).bit_length()}, 1, 3, False),
        _job(chunks.key_side_kernel, f"*{t}", {**keys, "NV": nv, **sp, "ROUNDS": ROUNDS}, long.key_warps, 3, mma),
        _job(chunks.value_side_kernel, f"*{t}", {**heads, "BV": long.bv, **ss, "PIECES": mma}, long.value_warps, long.stages, mma),
        _job(chunks.leave_keys_kernel, f"*{t}", keys, 4, 3, False),
        _job(singles.commit_kernel, f"*{t}", {**heads, "BV": commit.bv, "BK": commit.bk, **ss, "PIECES": mma}, commit.warps, 3, mma),
    ]
    for part in (0,) if single.fused else (1, 2):
        bv, warps = (single.second_bv, single.second_warps) if part == 2 else (single.bv, single.warps)
        sizes = {**heads, "BV": bv, "BK": single.bk, "STAGES": single.stages, "PART": part, **ss}
        jobs.append(_job(singles.single_kernel, f"*{t}", sizes, warps, 3, mma))
    return jobs


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """Every kernel for each shape and dtype with the tiles of a device; the exact mode for the models' shape."""
    found: dict[str, CompileJob] = {}
    for t, itemsize in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for shape in SHAPES:
            dims = shape[2:]
            if t == "fp32" and shape is SHAPES[0] and shared_limit(capability) < 160 * 1024:
                continue  # `long_tile` refuses it
            for exact in (False, True) if t == "bf16" and shape is SHAPES[0] else (False,):
                for rows in _ROWS:
                    tiles = long_tile(capability, itemsize, *dims), single_tile(capability, itemsize, *dims, rows), commit_tile(capability, itemsize, *dims)
                    for job in jobs_for(t, shape, exact, *tiles):
                        found.setdefault(repr((job.function.__name__, job.types, job.constants, job.warps, job.stages)), job)
    return list(found.values())


def expected_dots(job: CompileJob) -> tuple[int, int]:
    """How many dots of a kernel start from zero, and how many go on from an accumulator: what the source says, counted by hand. A product of two fp32
    operands is one dot, followed by two on its accumulator where there are two pieces; a pass over the anchor is a chain, unless it is one dot."""
    sizes, more = job.constants, 2 if job.constants.get("SP") == 2 else 0
    name = job.function.__name__
    if name == "key_side_kernel":  # k k^T and a product in all blocks at once; three times k k^T, A T, T x; q k^T, P T
        return 13, 8 * more
    if name == "value_side_kernel":  # S^T k and S^T q, T R, M R, the state's
        return 2 * sizes["SS"] + 2, 2 * more + sizes["SP"]
    if name == "commit_kernel":
        return 1, more + sizes["SP"]
    if name == "single_kernel":  # k k^T, rows of A and P with T, the block with x; the pass; w R
        passes = 0 if sizes["PART"] == 2 else sizes["SS"]
        fresh = {0: 4, 1: 3, 2: 1}[sizes["PART"]] + (passes if sizes["BK"] == sizes["DK"] else 0)
        return fresh, {0: 3, 1: 2, 2: 1}[sizes["PART"]] * more + (0 if sizes["BK"] == sizes["DK"] else passes)
    return 0, 0
