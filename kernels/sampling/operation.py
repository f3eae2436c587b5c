"""The sampling operations: both forms, their inputs, their tolerance, and the compiled forms of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.sampling import kernel, plain, sampler
from twinfer.kernels.sampling.sampler import MAX_LOGPROBS, Columns, Scratch, Stages
from twinfer.kernels.sampling.tiles import DEFAULT, Tiles

_CUT_UP = Tiles(chunk=64, block=32, digit=4, digits=16, sparse=4, sparse_programs=2, warps=4)


def _tiles(name: str, device: torch.device) -> Tiles:
    """Tiles of a case. The interpreter's time is the number of operations, so there a search has few levels, which would not fit a GPU's registers."""
    small = Tiles(chunk=1024, block=1024, digit=8 if device.type == "cpu" else 4, digits=256, sparse=64, sparse_programs=1, warps=4)
    return {"small": small, "cut_up": _CUT_UP, "default": DEFAULT}[name]


_SCRATCH = tuple(sampler.scratch_shapes(1, 1))


def _scratch(max_positions: int, vocabulary: int, tiles: Tiles, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a Scratch by argument name, filled with what no kernel may read into a result."""
    scratch = Scratch.empty(max_positions, vocabulary, tiles, device)
    tensors: dict[str, Tensor] = {f"scratch_{name}": getattr(scratch, name) for name in _SCRATCH}
    for tensor in tensors.values():
        tensor.fill_(torch.nan if tensor.dtype.is_floating_point else torch.iinfo(tensor.dtype).min + 7)
    return tensors


def _taken(arguments: dict[str, Any]) -> Scratch:
    """Takes what `_scratch` gave out of the arguments of a call."""
    return Scratch(**{name: arguments.pop(f"scratch_{name}") for name in _SCRATCH})


def _csr(counts: list[int], vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """indptr and distinct ids of rows with these numbers of entries, int32."""
    device = generator.device
    ids = [torch.randperm(vocabulary, generator=generator, device=device)[:count] for count in counts]
    return torch.tensor([0, *counts], device=device).cumsum(0).int(), torch.cat(ids).int()


def make_sample(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: n positions and rows, V; `adjusted` (bias, penalties and a mask in some rows), tiles by name. Row r has every third filter, from r on."""
    n, vocabulary, device = case["n"], case["V"], generator.device
    tiles = _tiles(case["tiles"], device)

    def by_row(*values: float) -> Tensor:
        return torch.tensor([values[row % len(values)] for row in range(n)], device=device)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    some = [min(5 * (row % 3), vocabulary) if case["adjusted"] else 0 for row in range(n)]
    bias_indptr, bias_ids = _csr(some, vocabulary, generator)
    seen_indptr, seen_ids = _csr(some, vocabulary, generator)
    bias = torch.randn(len(bias_ids), generator=generator, device=device)
    lowest = torch.iinfo(torch.int32).min
    tensors = {
        "logits": (torch.randn(n, vocabulary, generator=generator, device=device) * 3).to(dtype),
        "rows": torch.randperm(n, generator=generator, device=device).int(),
        "positions": integers(1, 2**31 - 1, n).int(),
        "temperature": by_row(0.7, 1.0, 2.0, 0.0).float(),
        "top_k": by_row(0, 20, 0, 1, 3).int(),
        "top_p": by_row(0.9, 1.0, 0.5).float(),
        "min_p": by_row(0.0, 0.05).float(),
        "repetition": by_row(1.3, 1.0).float(),
        "presence": by_row(0.0, 0.5).float(),
        "frequency": by_row(0.25, 0.0, 0.0).float(),
        "seed": integers(-(2**63), 2**63 - 1, n),
        "sample": integers(0, 1024, n).int(),
        "bias_indptr": bias_indptr,
        "bias_ids": bias_ids,
        "bias_values": torch.where(bias > 1, -torch.inf, bias),
        "seen_indptr": seen_indptr,
        "seen_ids": seen_ids,
        "seen_counts": integers(0, 3, len(seen_ids)).int(),
        "slots": torch.randperm(n, generator=generator, device=device).int(),
        "tokens": torch.full((n,), lowest, device=device, dtype=torch.int32),
        "errors": torch.full((n, 3), lowest, device=device, dtype=torch.int32),
        "feed": torch.full((n,), lowest, device=device, dtype=torch.int32),
    }
    if case["adjusted"]:
        tensors["mask"] = integers(-(2**31), 2**31, n, -(-vocabulary // 32)).int()
    scratch = _scratch(n, vocabulary, tiles, device)
    constants = {"stages": Stages(adjust=bool(case["adjusted"])), "tiles": tiles}
    return Example(tensors | scratch, constants, outputs=("tokens", "errors", "feed"), workspace=tuple(scratch))


def _sample(mask: Tensor | None = None, **arguments: Any) -> None:
    names = [name for name in Columns.__slots__ if name != "mask"]
    columns = Columns(**{name: arguments.pop(name) for name in names}, mask=mask)
    sampler.sample(columns=columns, scratch=_taken(arguments), **arguments)


def _logprobs(**arguments: Any) -> None:
    sampler.logprobs(scratch=_taken(arguments), **arguments)


SAMPLE = Operation(
    name="sample",
    plain=plain.sample,
    triton=_sample,
    make=make_sample,
    cases=(
        {"n": 5, "V": 300, "adjusted": 0, "tiles": "small"},
        {"n": 3, "V": 130, "adjusted": 1, "tiles": "small"},
        {"n": 1, "V": 131, "adjusted": 0, "tiles": "cut_up"},
    ),
    large=({"n": 64, "V": 151936, "adjusted": 0, "tiles": "default"}, {"n": 16, "V": 151937, "adjusted": 1, "tiles": "default"}),
    tolerance={"float32": 0.0, "float16": 0.0, "bfloat16": 0.0},
)


def make_logprobs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: n positions, each of a row of its own, every third of which does not ask; V; k alternatives; tiles by name."""
    n, vocabulary, k, device = case["n"], case["V"], case["k"], generator.device
    tiles = _tiles(case["tiles"], device)
    tensors = {
        "logits": (torch.randn(n, vocabulary, generator=generator, device=device) * 3).to(dtype),
        "rows": torch.randperm(n, generator=generator, device=device).int(),
        "asked": torch.tensor([(k, 0, -1)[row % 3] for row in range(n)], device=device, dtype=torch.int32),
        "targets": torch.randint(0, vocabulary, (n,), generator=generator, device=device, dtype=torch.int32),
        "logprob": torch.full((n,), torch.nan, device=device, dtype=torch.float64),
        "top_ids": torch.full((n, k), torch.iinfo(torch.int32).min, device=device, dtype=torch.int32),
        "top_logprobs": torch.full((n, k), torch.nan, device=device, dtype=torch.float64),
    }
    scratch = _scratch(n, vocabulary, tiles, device)
    return Example(tensors | scratch, {"tiles": tiles}, outputs=("logprob", "top_ids", "top_logprobs"), workspace=tuple(scratch))


LOGPROBS = Operation(
    name="logprobs",
    plain=plain.logprobs,
    triton=_logprobs,
    make=make_logprobs,
    cases=({"n": 1, "V": 7, "k": 0, "tiles": "small"}, {"n": 4, "V": 1500, "k": 5, "tiles": "small"}, {"n": 2, "V": 130, "k": 20, "tiles": "cut_up"}),
    large=({"n": 64, "V": 151936, "k": 20, "tiles": "default"},),
    # relative to the largest log probability, 10 to 20; the kernel was seen at 5e-9 in the interpreter, the plain form is fp64 itself
    tolerance={"float32": 5e-8, "float16": 5e-8, "bfloat16": 5e-8},
)

_POINTERS = {
    "*fp64": ("SCORES", "BEST", "TOP", "DRAW", "LOGPROB", "TOP_LOGPROBS"),
    "*fp32": ("TEMPERATURE", "TOP_PS", "MIN_P", "REPETITION", "PRESENCE", "FREQUENCY", "BIAS_VALUES"),
    "*i64": ("SEED", "CUT", "BINS", "STATE", "PEAKS", "MASS"),
    "*i32": (
        "ADJUSTED", "ROWS", "POSITIONS", "SLOTS", "FEED", "TOKENS", "ERRORS", "TARGETS", "ASKED", "TOP_IDS", "TOP_KS", "SAMPLE", "MASK", "MODE", "CUT_ID",
        "BEST_ID", "BAD", "BAD_ID", "DRAW_ID", "BIAS_INDPTR", "BIAS_IDS", "SEEN_INDPTR", "SEEN_IDS", "SEEN_COUNTS",
    ),
    "i32": ("stride", "V", "words", "level", "shift", "last", "last_shift", "purpose", "num_top", "out_width"),
}  # fmt: skip
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names}


def compile_jobs(capability: tuple[int, int] = (9, 0), vocabulary: int = 151936, logits: tuple[str, ...] = ("bf16", "fp32")) -> list[CompileJob]:
    """Every compiled form of a vocabulary, for each type of logits. No integer is specialised."""
    tiles = DEFAULT
    chunks = -(-vocabulary // tiles.chunk)
    padded = 1 << (chunks - 1).bit_length()
    walk = {"S": chunks, "CHUNK": tiles.chunk, "BLOCK": tiles.block}
    combine = {"S": chunks, "PADDED": padded}
    search = combine | {"LEVELS": 64 // tiles.digit, "RADIX": 2**tiles.digit, "CHUNK": tiles.chunk, "BLOCK": tiles.digits}
    jobs: list[CompileJob] = []

    def add(function: Any, dtype: str, constants: dict[str, Any], warps: int, **types: str) -> None:
        known = _TYPES | types | {"LOGITS": f"*{dtype}"}
        jobs.append(CompileJob(function, {name: known[name] for name in function.arg_names if name not in constants}, constants, warps, 3))

    for dtype in logits:
        for masked in (False, True):
            add(kernel.dense_kernel, dtype, {"MASKED": masked, "CHUNK": tiles.chunk, "BLOCK": tiles.block}, tiles.warps)
        for adjust in (False, True):
            add(kernel.stats_kernel, dtype, walk | {"ADJUST": adjust}, tiles.warps)
            for by_mass in (False, True):
                bound = "*fp32" if by_mass else "*i32"
                for function in (kernel.digit_kernel, kernel.settle_kernel):
                    add(function, dtype, search | {"ADJUST": adjust, "BY_MASS": by_mass}, tiles.warps, BOUND=bound)
            add(kernel.draw_kernel, dtype, walk | {"ADJUST": adjust}, tiles.warps)
        for drawn in (False, True):
            for feeds in (False, True):
                add(kernel.finish_kernel, dtype, combine | {"ANY_DRAWN": drawn, "FEEDS": feeds}, 1)
        wide = {"S": chunks, "WIDTH": MAX_LOGPROBS}
        add(kernel.peaks_kernel, dtype, wide | {"CHUNK": tiles.chunk}, tiles.warps)
        add(kernel.mass_kernel, dtype, wide | walk | {"PADDED": padded}, tiles.warps)
        add(kernel.report_kernel, dtype, wide | {"PADDED": padded, "CANDIDATES": padded * MAX_LOGPROBS}, 4)
    add(kernel.bias_kernel, "fp32", {"BLOCK": tiles.sparse}, tiles.warps)
    add(kernel.penalty_kernel, "fp32", {"BLOCK": tiles.sparse}, tiles.warps)
    add(kernel.begin_kernel, "fp32", combine, 1)
    return jobs
