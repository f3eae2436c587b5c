"""The gates of the fast engine's numbers on a GPU: against the fp32 reference (logic), against plain bf16 PyTorch's own distance (numerics), against
HF's goldens, and by the names of the kernels that ran. It measures no time. `python -m twinfer.bench.numerics --help`.

For each model, all in one process and on the same prompts:
logic     fast in fp32 against the reference in fp32, TF32 off: no log probability may differ by more than 1e-3 nat
numerics  fast in bf16 against the reference in fp32: mean, 99th percentile, regret and the worst request's mean within 1.5 times those of the reference
          (plain PyTorch) in bf16, which must be above zero
golden    fast in bf16 against HF's stored fp32 and bf16 logits, where the model has any
kernels   every kernel of a few fast steps is one of ours, a cuBLAS product where the table allows it, a copy, or torch's row gather

A shape with random weights gets its head scaled first, so that the mean probability of the likeliest token is that of a trained model: flat logits
would hide faults. The reference's own logits give the factor. Weights are drawn in bf16 and widened for fp32, so both dtypes have the same numbers.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pkgutil
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import twinfer.kernels
from twinfer.bench.models import BUNDLED, Model, fast_engine, load_model, reference_engine
from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, today
from twinfer.bench.shapes import SHAPES, shape_source
from twinfer.bench.table import figure, text_table
from twinfer.bench.tap import prefill, record, score
from twinfer.engine.checkpoint import HEAD
from twinfer.engine.engine import Engine
from twinfer.errors import TwinferError
from twinfer.golden.compare import Comparison, Scores, Tolerance, compare_scores
from twinfer.golden.manifest import FOLDER, Recorded, load_goldens
from twinfer.kernels.matmul.cublas import TABLE, stack
from twinfer.limits import Limits, ceil_div
from twinfer.sampling import SamplingParams

LOGIC_NAT = 1e-3
FACTOR = 1.5
GOLDEN = Tolerance("golden", mean=0.06, p99=0.20, regret=0.2)
GOLDEN_POSITIONS = 800
NUM_TOP = 32  # likeliest tokens that are compared at a position
TOP1 = (0.3, 0.9)  # where the mean probability of the likeliest token must lie
# Random prompts: none so short that its own mean says nothing, some over several splits of attention; 4053 positions in all, since regret is a largest
# value and over few positions hangs on which near tie is among them.
LENGTHS = (1500, 800, 600, 400, 260, 200, 129, 100, 64)
Prompts = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure and what it had to be. limit is inclusive; floor is plain PyTorch's figure, where the limit is a multiple of it."""

    model: str
    check: str
    metric: str
    value: float
    unit: str
    passed: bool
    limit: float | None = None
    floor: float | None = None
    detail: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


# ---- the model under test ----------------------------------------------------------------------------------------------------------


def random_prompts(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(f"numerics/{seed}")
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def limits_of(prompts: Prompts) -> Limits:
    """Room for all prompts in one step, up to 8192 tokens, and a few tokens more."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    context = longest + 16
    return Limits(
        max_batch=max(4, len(prompts)),
        max_step_tokens=max(4, len(prompts), min(total, 8192)),
        max_chunk_tokens=min(total, 8192),
        warmup_tokens=1,
        max_context=context,
        max_step_context=max(4, len(prompts)) * context,
        max_logit_tokens=256,
        page_size=64,
        num_pages=max(4, len(prompts)) * ceil_div(context, 64),
        buckets=(max(4, len(prompts)),),
    )


def widened(model: Model) -> Model:
    """The same numbers in float32; a tied head stays the embedding's tensor."""
    wide = {name: tensor.float() for name, tensor in model.weights.items() if name != HEAD}
    tied = next((name for name, tensor in model.weights.items() if name != HEAD and tensor is model.weights[HEAD]), None)
    wide[HEAD] = model.weights[HEAD].float() if tied is None else wide[tied]
    return replace(model, weights=wide)


def scaled(model: Model, factor: float) -> Model:
    """The model with its head times `factor`, apart from the embedding."""
    return replace(model, weights=model.weights | {HEAD: (model.weights[HEAD].float() * factor).to(model.weights[HEAD].dtype)})


def top1(logits: torch.Tensor, factor: float = 1.0) -> float:
    """Mean probability of the likeliest token. logits [n, V]."""
    wide = logits.double() * factor
    return float((wide.amax(-1) - wide.logsumexp(-1)).exp().mean())


def head_factor(logits: torch.Tensor, wanted: float = 0.6) -> float:
    """By how much the head must be scaled for a mean top-1 probability of `wanted`: bisection, in which it grows with the factor. logits [n, V]."""
    low, high = 0.0, 1.0
    while top1(logits, high) < wanted:
        low, high = high, 2 * high
        if high > 1e6:
            raise ValueError("no factor brings the likeliest token's probability up: the logits are all equal")
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if top1(logits, middle) < wanted else (low, middle)
    return (low + high) / 2


def sample_logits(engine: Engine, prompts: Prompts, most: int = 256) -> torch.Tensor:
    """Up to `most` positions' logits [n, V], spread over all prompts, on the engine's device."""
    every = ceil_div(sum(map(len, prompts)), most)
    rows: list[torch.Tensor] = []
    prefill(engine, prompts, lambda name, positions, logits: rows.append(logits[torch.from_numpy(positions % every == 0).to(logits.device)].clone()))
    return torch.cat(rows)


# ---- the comparisons ---------------------------------------------------------------------------------------------------------------


def assert_no_tf32(device: torch.device) -> None:
    """Raises RuntimeError unless float32 products on the device are IEEE ones: by torch's settings, and by the error of a product (TF32's is 3e-4)."""
    if device.type != "cuda":
        return
    if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
        raise RuntimeError("TF32 is on: torch.set_float32_matmul_precision('highest')")
    a = torch.randn(512, 512, device=device, generator=torch.Generator(device).manual_seed(0))
    exact = a.double() @ a.double()
    error = float((a @ a - exact).abs().max() / exact.abs().max())
    if not error < 1e-5:
        raise RuntimeError(f"float32 products have an error of {error:.1e}: TF32 is on, whatever torch's settings say")


def against(name: str, goldens: Sequence[Recorded], scores: Sequence[Scores], tolerance: Tolerance) -> Comparison:
    return compare_scores(name, ((f"request {i}", g, s) for i, (g, s) in enumerate(zip(goldens, scores, strict=True))), tolerance)


def worst_request(goldens: Sequence[Recorded], scores: Sequence[Scores]) -> float:
    """The largest mean difference of a single request, in nat."""
    return max(compare_scores("one", [("one", g, s)]).mean for g, s in zip(goldens, scores, strict=True))


def logic_check(model: str, goldens: Sequence[Recorded], fast: Sequence[Scores]) -> Check:
    """fp32 against fp32, the largest difference over all positions."""
    found = against("fp32", goldens, fast, Tolerance("logic", max=LOGIC_NAT))
    detail = {"positions": found.num_positions, "worst": f"{found.worst_case}[{found.worst_position}]"}
    return Check(model, "logic_fp32", "max", found.max, "nat", found.passed, LOGIC_NAT, None, detail)


def numerics_checks(model: str, dtype: str, goldens: Sequence[Recorded], plain: Sequence[Scores], fast: Sequence[Scores]) -> Iterator[Check]:
    """The fast engine's distance from fp32 beside plain PyTorch's in the same dtype. A floor of zero is a failure: nothing was measured then."""
    floor, found = against("plain", goldens, plain, Tolerance("unlimited")), against("fast", goldens, fast, Tolerance("unlimited"))
    pairs = {name: (getattr(floor, name), getattr(found, name)) for name in ("mean", "p99", "regret")}
    pairs["worst_request_mean"] = (worst_request(goldens, plain), worst_request(goldens, fast))
    for metric, (own, value) in pairs.items():
        yield Check(model, f"numerics_{dtype}", metric, value, "nat", own > 0 and value <= FACTOR * own, FACTOR * own, own, {"positions": found.num_positions})


def golden_checks(model: str, stored: str, goldens: Sequence[Recorded], fast: Sequence[Scores], least: int = GOLDEN_POSITIONS) -> Iterator[Check]:
    """Against HF's stored logits, at no fewer than `least` positions."""
    found = against("HF", goldens, fast, GOLDEN)
    for metric in ("mean", "p99", "regret"):
        value, limit = getattr(found, metric), getattr(GOLDEN, metric)
        passed = found.num_positions >= least and value <= limit
        yield Check(model, f"golden_hf_{stored}", metric, value, "nat", passed, limit, None, {"positions": found.num_positions})


# ---- kernels by name ---------------------------------------------------------------------------------------------------------------

CUBLAS = re.compile(r"nvjet|cutlass|xmma_gemm|sm\d+_.*gemm|cublas|gemm.*kernel")
COPY = re.compile(r"Memcpy|Memset", re.IGNORECASE)
GATHER = re.compile(r"index_?select|vectorized_gather", re.IGNORECASE)  # torch.index_select, of the hidden vectors that are sampled


def our_kernels() -> set[str]:
    """Names of every Triton function in twinfer.kernels."""
    names = set()
    for found in pkgutil.walk_packages(twinfer.kernels.__path__, "twinfer.kernels."):
        if found.name.endswith(".kernel"):
            for value in vars(importlib.import_module(found.name)).values():
                function = getattr(value, "fn", None)
                if function is not None and type(value).__module__.startswith("triton.") and function.__module__ == found.name:
                    names.add(function.__name__)
    return names


def kind_of(kernel: str, ours: set[str]) -> str:
    """'ours', 'cublas', 'copy', 'gather', or 'foreign'."""
    if kernel in ours:
        return "ours"
    return next((kind for kind, pattern in (("copy", COPY), ("gather", GATHER), ("cublas", CUBLAS)) if pattern.search(kernel)), "foreign")


def kernels_run(work: Callable[[], None]) -> Counter[str]:
    """Names of everything that runs on the GPU during `work`, by torch's profiler; kernels of a replayed graph are among them."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return Counter(event.name for event in found.events() or () if event.device_type.name == "CUDA")


def kernel_check(model: str, names: Mapping[str, int], cublas_allowed: bool) -> Check:
    """The number of launches that are none of ours and not allowed; something of ours must have run."""
    ours = our_kernels()
    kinds = Counter[str]()
    for name, count in names.items():
        kinds[kind_of(name, ours)] += count
    wrong = {name: count for name, count in names.items() if kind_of(name, ours) in ("foreign", *(() if cublas_allowed else ("cublas",)))}
    detail = {"launches": dict(kinds), "not_allowed": wrong, "ours": sorted(name for name in names if name in ours)}
    return Check(model, "kernels", "not_allowed", sum(wrong.values()), "launches", not wrong and kinds["ours"] > 0, 0, None, detail)


def exercise(engine: Engine, prompts: Prompts) -> None:
    """Prefill, mixed steps, decode by graph and every kind of sampling."""
    plain = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    drawn = replace(plain, temperature=0.8, seed=1)
    each = (plain, drawn, replace(drawn, top_p=0.9, top_k=50, presence_penalty=0.1), replace(plain, logprobs=5, prompt_logprobs=5))
    engine.generate([list(prompts[i % len(prompts)])[: 40 + 8 * i] for i in range(len(each))], each)
    engine.generate([list(p) for p in prompts], plain)


# ---- a model's gates ---------------------------------------------------------------------------------------------------------------


def gates(
    model: Model, prompts: Prompts | None = None, wanted_top1: float = 0.6, stored: Path | None = None, least: int = GOLDEN_POSITIONS
) -> Iterator[Check]:
    """All checks of a model, whose weights have the narrow dtype. Engines are made and let go one after the other.

    prompts  None: the goldens' documents, or random ones
    stored   the model's directory, where it has goldens
    least    golden positions that must have been compared
    """
    goldens = load_goldens(stored).documents if stored is not None else {}
    listed: Prompts = prompts or [case.token_ids.tolist() for case in goldens.values()] or random_prompts(model.config.vocab_size)
    limits, name, dtype = limits_of(listed), model.name, model.dtype
    assert_no_tf32(model.device)
    wide = widened(model)
    if model.random_seed is not None:
        logits = _with(reference_engine, wide, limits, lambda engine: sample_logits(engine, listed))
        factor, before = head_factor(logits, wanted_top1), top1(logits)
        del logits
        model = scaled(model, factor)
        wide.weights[HEAD] = model.weights[HEAD].float()
        yield Check(name, "head", "factor", factor, "1", True, None, None, {"top1_before": before})
    right = _with(reference_engine, wide, limits, lambda engine: record(engine, listed, min(NUM_TOP, model.config.vocab_size)))
    probability = float(np.mean(np.concatenate([np.exp(r.logprobs[:, 0]) for r in right])))
    within = model.random_seed is None or TOP1[0] <= probability <= TOP1[1]  # a trained model's is what it is
    yield Check(name, "head", "top1_probability", probability, "1", within, TOP1[1], None, {"least": TOP1[0]})
    yield logic_check(name, right, _with(fast_engine, wide, limits, lambda engine: score(engine, listed, right)))
    wide.weights.clear()
    plain = _with(reference_engine, model, limits, lambda engine: score(engine, listed, right))

    def narrow(engine: Engine) -> list[Check]:
        found = list(numerics_checks(name, dtype, right, plain, score(engine, listed, right)))
        for precision in ("fp32", "bf16") if goldens else ():
            recorded = [getattr(case, precision).before(len(prompt)) for case, prompt in zip(goldens.values(), listed, strict=True)]
            found += golden_checks(name, precision, recorded, score(engine, listed, recorded), least)
        if model.device.type == "cuda":
            exercise(engine, listed)  # once unseen: what is compiled at its first call may run other things
            on = stack(model.device)
            found.append(kernel_check(name, kernels_run(lambda: exercise(engine, listed)), on is not None and on in TABLE))
        return found

    yield from _with(fast_engine, model, limits, narrow)


def _with(make: Callable[..., Engine], model: Model, limits: Limits, work: Callable[[Engine], T]) -> T:
    """What `work` finds on an engine without a prefix cache, whose memory is free again when this returns."""
    engine = make(model, limits, prefix_cache=False)
    try:
        return work(engine)
    finally:
        engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: a JSON line a check, then a table. 1 where a check failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.numerics", description="Gates of the fast engine's numbers on a GPU.")
    shapes = ", ".join(SHAPES)
    what = f"bundled, a checkpoint directory, or any of {shapes} (or its first layers: qwen3-32b-2layers); comma-separated"
    parser.add_argument("--model", default="bundled,qwen3-0.6b,qwen3-8b", help=what)
    parser.add_argument("--dtype", default="bfloat16", help="the narrow dtype")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--top1", type=float, default=0.6, help="mean probability of the likeliest token that a random head is scaled to")
    parser.add_argument("--record", action="store_true", help="add the figures to the records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records to add to")
    parser.add_argument("--commit", help="hash to record, where the code runs outside of its repository")
    options = parser.parse_args(arguments)
    found: list[Check] = []
    try:
        for name in options.model.split(","):
            path = str(BUNDLED) if name == "bundled" else name
            stored = Path(path) if shape_source(name) is None and (Path(path) / FOLDER).is_dir() else None
            for check in gates(load_model(path, options.dtype, options.device, options.seed), wanted_top1=options.top1, stored=stored):
                found.append(check)
                print(json.dumps(check.to_dict()), flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    except (TwinferError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print()
    print(table_of(found))
    if options.record:
        for file in append(records_of(found, options), options.records):
            print(f"{len(found)} records added to {file}")
    return 0 if all(check.passed for check in found) else 1


def table_of(checks: Iterable[Check]) -> str:
    rows = []
    for c in checks:
        rows.append([c.model, c.check, c.metric, "passed" if c.passed else "FAILED", *(figure_or_power(v) for v in (c.value, c.limit, c.floor))])
    return text_table(["model", "check", "metric", "", "value", "limit", "floor"], rows, left=4)


def figure_or_power(value: float | None) -> str:
    """A small figure by its power of ten."""
    return figure(value) if value is None or value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def records_of(checks: Iterable[Check], options: argparse.Namespace) -> list[Record]:
    """Every check as a record of the fast engine; whether it passed, limit and floor are in its detail."""
    return [
        Record(
            model=c.model,
            workload=f"gate_{c.check}",
            engine="fast",
            metric=c.metric,
            value=c.value,
            unit=c.unit,
            law2=None,
            commit=options.commit or current_commit(),
            date=today(),
            device=device_slug(options.device),
            versions=package_versions("twinfer", "torch", "triton", "transformers"),
            seed=options.seed,
            detail={key: value for key, value in c.to_dict().items() if key in ("passed", "limit", "floor")} | dict(c.detail or {}),
        )
        for c in checks
    ]


if __name__ == "__main__":
    sys.exit(main())
