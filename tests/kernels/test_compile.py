"""The compile gate: kernels compile for the devices that they name, within shared memory, to the instructions that their tables rest on. No GPU, no timing.

By default every entry of the tables that serve untimed devices, in bf16 for each device and in fp32 for the smallest; one entry a kernel for 9.0; and
every kernel without a table for the oldest device, the newest two and 9.0. SOAK=1 compiles the whole matrix. Triton's cache keeps what has not
changed, by kernel source, options, target and version.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import compiling
from twinfer.kernels.attention.tiles import shared_limit
from twinfer.kernels.gdn.operation import expected_dots
from twinfer.kernels.operation import CompileJob

MODULES = (
    "attention", "embedding", "experts", "gated_norm", "gdn", "gdn_inputs",
    "matmul", "norm", "output_gate", "page_table", "rope", "router", "sampling", "swiglu",
)  # fmt: skip
TABLES = {
    "attention": ("SPREAD", "D", "BM", "BN"), "matmul": ("BM", "BN", "BK", "SWAP", "TMA"), "experts": ("GATED", "ROWS", "BN", "BK", "SWAP", "TMA"),
    "gdn": ("PART",),
}  # fmt: skip
# no device has run them: compiled for 9.0 in every form that serves bf16
UNTUNED = {"experts": ("EVEN_K", "k"), "gdn": ("BV", "BK", "SS"), "router": ("BLOCK", "EXPERT_BLOCK")}
TARGETS = (80, 86, 89, 90, 100, 120)
TUNED = 90  # its tables are its own
SMALLEST = 86  # the least shared memory that there is: entries for fp32, whose tiles are the largest, are compiled for it
SAME = (86, 89)  # kernels without a table have no size that depends on the device: compiled for the oldest and the newest code alone, and for 9.0
SOAK = os.environ.get("SOAK", "0") not in ("", "0")
Facts = dict[str, Any]


@cache
def jobs_of(module: str, target: int) -> list[CompileJob]:
    return compiling.jobs_of(module, target)


def chosen(module: str, target: int) -> list[int]:
    """Numbers of the jobs to compile."""
    jobs = jobs_of(module, target)
    if SOAK:
        return list(range(len(jobs)))
    first: dict[Any, int] = {}
    for number, job in enumerate(jobs):
        dtype = next(iter(job.types.values()))
        names = TABLES.get(module, ())
        tables: list[object] = [job.constants.get(name) for name in names] + [job.warps, job.stages]
        if target == TUNED and module in UNTUNED:
            tables += [job.constants.get(name) for name in UNTUNED[module]]
        elif target == TUNED:
            tables, dtype = [job.constants.get("SPREAD")], ""
        if module == "gdn" and target in (80, 89):
            continue  # its tiles and its code there are those for 86
        if target in SAME if module not in TABLES else "fp32" in dtype and target != SMALLEST:
            continue
        if "fp16" not in dtype:
            first.setdefault((job.function.__name__, "" if module == "sampling" else dtype, *tables), number)
    return list(first.values())


@pytest.fixture(scope="module")
def found() -> list[tuple[CompileJob, str, int, Facts]]:
    """(job, module, target, what `compiling` says of it), compiled in a process whose Triton compiles."""
    items = [(module, target, number) for module in MODULES for target in TARGETS for number in chosen(module, target)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(Path(compiling.__file__))], input=json.dumps(items), env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted(tuple(facts["item"]) for facts in told) == sorted(items), "every job is answered once"
    return [(jobs_of(module, target)[number], module, target, facts) for facts in told for module, target, number in [facts["item"]]]


def sound(found: list[tuple[CompileJob, str, int, Facts]]) -> list[tuple[CompileJob, str, int, Facts]]:
    """Those that compiled; the others fail a test of their own."""
    return [each for each in found if "error" not in each[3]]


def label(job: CompileJob, module: str, target: int) -> str:
    sizes = {name: value for name, value in job.constants.items() if isinstance(value, int)}
    return f"{module}.{job.function.__name__} {next(iter(job.types.values()))} for {target}, {sizes}, {job.warps} warps, {job.stages} stages"


def all_of(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


def test_every_folder_of_kernels_is_compiled() -> None:
    folders = {path.parent.name for path in Path(importlib.import_module("twinfer.kernels").__file__ or "").parent.glob("*/kernel.py")}
    assert folders == set(MODULES)


def test_each_compiles_within_shared_memory(found: list[tuple[CompileJob, str, int, Facts]]) -> None:
    """Of the device, and of the table's own bound."""
    problems = []
    for job, module, target, facts in found:
        limit = min(shared_limit((target // 10, target % 10)), job.shared if job.shared is not None else 2**30)
        if "error" in facts or facts["shared"] > limit:
            problems.append(f"{label(job, module, target)}: {facts.get('error') or facts['shared']}, limit {limit}")
    all_of(problems)


def test_what_the_tables_claim_is_in_the_code(found: list[tuple[CompileJob, str, int, Facts]]) -> None:
    problems, claimed = [], set()
    for job, module, target, facts in sound(found):
        counts = facts["instructions"]
        names = {
            "mma": ("mma.sync", "wgmma.mma_async", "tcgen05.mma"),
            "wgmma": ("wgmma.mma_async",),
            "async": ("cp.async.cg", "cp.async.ca", "cp.async.bulk.tensor"),
            "tma": ("cp.async.bulk.tensor",),
        }
        claimed |= job.claims
        missing = {claim for claim in job.claims if not any(counts[name] for name in names[claim])}
        if missing:
            problems.append(f"{label(job, module, target)}: no {', '.join(sorted(missing))}")
        if not job.claims & {"mma"} and any(counts[name] for name in names["mma"]):
            problems.append(f"{label(job, module, target)}: runs on a matrix unit, which rounds fp32 to TF32")
    all_of(problems)
    assert claimed == {"mma", "wgmma", "async", "tma"}


def test_each_dot_accumulates_what_the_source_says(found: list[tuple[CompileJob, str, int, Facts]]) -> None:
    """A product is one chain of dots; attention's scores start from zero, and its values go on from the rescaled accumulator, in as many places; Gated
    DeltaNet's kernels have as many of either kind as their source."""
    problems, with_dots = [], set()
    for job, module, target, facts in sound(found):
        dots = facts["dots"]
        if dots["added"] or dots["tf32"]:
            problems.append(f"{label(job, module, target)}: {dots}")
        if dots["fresh"] + dots["chained"]:
            with_dots.add(module)
            tensor_memory = facts["instructions"]["tcgen05.mma"] > 0  # its first dot of a loop is peeled off, and starts from zero by a flag
            product = dots["chained"] if tensor_memory else 0
            if module == "gdn":
                right, has = expected_dots(job), (dots["fresh"], dots["chained"])
                if sum(right) != sum(has) or (right != has and not tensor_memory):
                    problems.append(f"{label(job, module, target)}: {dots}, not {right}")
                continue
            wanted = {"matmul": product, "experts": product, "attention": dots["chained"]}[module]
            if dots["fresh"] != wanted or not dots["chained"]:
                problems.append(f"{label(job, module, target)}: {dots}")
    all_of(problems)
    assert with_dots == {"matmul", "experts", "attention", "gdn"}


def test_rope_rounds_each_product(found: list[tuple[CompileJob, str, int, Facts]]) -> None:
    """Its launches forbid to fuse; where they did not, the compiler would."""
    ropes = [facts for _, module, _, facts in sound(found) if module == "rope"]
    assert ropes
    assert all(facts["fused"] == 0 for facts in ropes)
    job = next(j for j in jobs_of("rope", TUNED) if j.constants.get("Q_WEIGHT", 0) is None)
    assert job.options == {"enable_fp_fusion": False}


def test_fused_tells_a_product_and_sum_from_a_product() -> None:
    minus_zero = "mov.b32 \t%r9, -2147450880;\n"
    assert compiling.fused(minus_zero + "fma.rn.bf16x2 \t%r1, %r2, %r3, %r9;") == 0
    assert compiling.fused(minus_zero + "fma.rn.bf16x2 \t%r1, %r2, %r3, %r4;") == 1
    assert compiling.fused("fma.rn.f32 \t%f1, %f2, %f3, %f4;\nfma.rn.f16 \t%rs1, %rs2, %rs3, %rs4;") == 1


def test_dots_are_told_apart() -> None:
    zero = "  %cst = arith.constant dense<0.000000e+00> : tensor<16x16xf32, #mma>\n"
    dot = "  %r = tt.dot %a, %b, {} : tensor<16x16xbf16, #ttg.dot_op<{{}}>>\n"
    assert compiling.dots(zero + dot.format("%cst")) == {"fresh": 1, "chained": 0, "added": 0, "tf32": 0}
    assert compiling.dots(zero + dot.format("%arg1")) == {"fresh": 0, "chained": 1, "added": 0, "tf32": 0}
    behind = "  %s = ttg.convert_layout %r : x\n  %t = arith.addf %u, %s : x\n"
    assert compiling.dots(zero + dot.format("%cst") + behind)["added"] == 1
    rounded = "  %r = tt.dot %a, %b, %cst, inputPrecision = tf32 : tensor<16x16xf32, #ttg.dot_op<{}>>\n"
    assert compiling.dots(zero + rounded)["tf32"] == 1
