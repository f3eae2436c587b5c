"""Compiles kernels for GPUs on a machine without one, and says what came out. A program that test_compile.py runs: never imported by tests, since Triton
must be imported without its interpreter; it judges nothing.

Reads from stdin a JSON list of [module of kernels/, compute capability as 90, number of the job]; writes one JSON object a line for each. Triton's own
cache (TRITON_CACHE_DIR) is keyed by kernel source, options, target and version: what has not changed is not compiled again.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from typing import Any

INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.cg", "cp.async.ca", "cp.async.bulk.tensor")
Item = tuple[str, int, int]


def jobs_of(module: str, target: int) -> list[Any]:
    """The compile jobs of one folder of kernels/ for a device."""
    jobs: list[Any] = importlib.import_module(f"twinfer.kernels.{module}.operation").compile_jobs((target // 10, target % 10))
    return jobs


def compiled(job: Any, target: int, options: dict[str, Any]) -> Any:
    """Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = job.function.arg_names
    types = {name: job.types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*") or name in job.aligned}
    source = ASTSource(job.function, types, dict(job.constants), aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": job.warps, "num_stages": job.stages, **options})


def dots(ttgir: str) -> dict[str, int]:
    """How the dots of a kernel sum.

    fresh    start from zero
    chained  go on from an accumulator
    added    times that a dot's result is added to something afterwards
    tf32     fp32 operands that are rounded to TF32
    """
    found = Counter(fresh=0, chained=0, added=0, tf32=0)
    zeros = set(re.findall(r"(%[\w#]+) = arith\.constant dense<0\.0+e\+00>", ttgir))
    results: set[str] = set()
    for line in ttgir.splitlines():
        if match := re.match(r"\s*(%\w+) = (?:tt\.dot|ttng\.warp_group_dot) %[\w#]+, %[\w#]+, (%[\w#]+)", line):
            results.add(match[1])
            found["fresh" if match[2] in zeros else "chained"] += 1
            found["tf32"] += "tf32" in line and bool(re.search(r"xf32, #ttg\.dot_op|memdesc<\w+xf32", line))
        elif match := re.match(r"\s*(?:%\w+ = )?ttng\.tc_gen5_mma %[\w#]+, %[\w#]+, %[\w#]+(?:\[[^\]]*\])?, (%\w+)", line):
            found["fresh" if match[1] == "%false" else "chained"] += 1
        elif match := re.match(r"\s*(%\w+)(?::\d+)? = (?:ttng\.warp_group_dot_wait|ttg\.convert_layout) (%\w+)", line):
            if match[2] in results:
                results.add(match[1])
        elif match := re.match(r"\s*%\w+ = arith\.addf (%\w+)(?:#\d)?, (%\w+)", line):
            found["added"] += match[1] in results or match[2] in results
    return dict(found)


def fused(ptx: str) -> int:
    """Multiply-adds in bf16 or fp16 whose factors and summand are all variables. One with a constant is how a GPU before 9.0 multiplies (+ -0) or adds
    (* 1 or -1): it rounds once, as the operation that it stands for."""
    constants = set(re.findall(r"mov\.b(?:16|32)\s+(%\w+), (?:0x)?-?[0-9a-fA-F]+;", ptx))
    operands = re.findall(r"fma\.rn(?:\.\w+)*\.(?:bf16|f16)(?:x2)?\s+%\w+, (%\w+), (%\w+), (%\w+);", ptx)
    return sum(not constants & set(each) for each in operands)


def facts(item: Item) -> dict[str, Any]:
    """What the gate judges."""
    module, target, number = item
    begin = time.process_time()
    told: dict[str, Any] = {"item": item}
    try:
        job = jobs_of(module, target)[number]
        out = compiled(job, target, dict(job.options))
        ptx = out.asm["ptx"]
        told |= {"shared": out.metadata.shared, "instructions": {name: ptx.count(name) for name in INSTRUCTIONS}, "dots": dots(out.asm["ttgir"])}
        told["fused"] = fused(ptx)
        if job.options:  # what the compiler does when it is not told
            told["fused_without_options"] = fused(compiled(job, target, {}).asm["ptx"])
    except Exception as error:  # the compiler raises many kinds; each is a finding
        told["error"] = f"{type(error).__name__}: {error}"[:500]
    return told | {"seconds": time.process_time() - begin}


def main() -> None:
    items = [tuple(item) for item in json.load(sys.stdin)]
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        for told in pool.imap_unordered(facts, items, chunksize=1):
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
