"""Timing by graph replay, compile checks without a GPU, parallel warm-up of the kernel cache, and records. Knows no kernel's meaning."""

import json
import multiprocessing
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

SHARED_SM90 = 232448  # bytes of shared memory that one block may have


@dataclass(frozen=True)
class Job:
    """One kernel in one compiled form. `args(device)` makes launch arguments whose types and alignments are those of the real launches."""

    label: str
    kernel: Any
    args: Callable[[str], list[Any]]
    constants: dict[str, Any]
    options: dict[str, Any]


def compile_for_sm90(job: Job) -> tuple[bool, str]:
    """Compile only, on any machine. Fails on an error, too much shared memory, or a bf16 kernel that lacks
    matrix instructions or asynchronous loads."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [n for n in job.kernel.arg_names if n not in job.constants]
    sig: dict[str, str] = dict.fromkeys(job.constants, "constexpr")
    aligned = []
    kinds = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    for n, a in zip(names, job.args("cpu"), strict=True):
        if hasattr(a, "block_shape"):
            sig[n] = f"tensordesc<{kinds[a.base.dtype]}{list(a.block_shape)}>"
        elif isinstance(a, torch.Tensor):
            sig[n] = "*" + kinds[a.dtype]
            aligned.append(n)
        else:
            sig[n] = "fp32" if isinstance(a, float) else "i32"
            if isinstance(a, int) and a % 16 == 0 and n not in ("M", "S", "MAXP"):
                aligned.append(n)
    order = {n: sig[n] for n in job.kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(job.kernel.arg_names) if n in aligned}
    begin = time.perf_counter()
    try:
        out = triton.compile(ASTSource(job.kernel, order, job.constants, attrs), target=GPUTarget("cuda", 90, 32), options=job.options)
    except Exception as e:  # the compiler raises many kinds; each is a finding here
        return False, f"{job.label}: {type(e).__name__} {str(e)[:200]}"
    ptx = out.asm["ptx"]
    what = {w: ptx.count(w) for w in ("wgmma.mma_async", "mma.sync", "cp.async.cg", "cp.async.bulk.tensor")}
    good = out.metadata.shared <= SHARED_SM90
    if "bf16" in order.values() or "*bf16" in order.values():
        good &= what["wgmma.mma_async"] + what["mma.sync"] > 0
        good &= job.options["num_stages"] == 1 or what["cp.async.cg"] + what["cp.async.bulk.tensor"] > 0
    return good, f"{job.label}: shared {out.metadata.shared} {what} {time.perf_counter() - begin:.1f} s"


JOBS: list[Job] = []


def _check(i: int) -> tuple[bool, str]:
    return compile_for_sm90(JOBS[i])


def _warm(i: int) -> tuple[bool, str]:
    job = JOBS[i]
    try:
        job.kernel.warmup(*job.args("cuda"), grid=(1, 1), **job.constants, **job.options)
    except Exception as e:  # as above
        return False, f"{job.label}: {type(e).__name__} {str(e)[:200]}"
    return True, job.label


def in_parallel(jobs: Iterable[Job], warm: bool, processes: int) -> tuple[list[str], list[str]]:
    """Compile every job, for sm_90 without a GPU or (warm) for this GPU into the cache. Forks: call it before CUDA is touched."""
    JOBS[:] = list(jobs)
    good, bad = [], []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for ok, text in pool.imap_unordered(_warm if warm else _check, range(len(JOBS)), chunksize=1):
            (good if ok else bad).append(text)
    return good, bad


def graph_us(calls: list[Callable[[], Any]], replays: int = 5) -> float:
    """Median time of one call in us, from replays of one graph that holds them all (so launch gaps count as in an engine's graph)."""
    for c in calls:
        c()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):  # not torch.cuda.graph: it collects garbage at every capture
        graph.capture_begin()
        for c in calls:
            c()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(replays):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / len(calls))
    torch.cuda.current_stream().wait_stream(side)
    return statistics.median(times)


def commit() -> str:
    def git(*arguments: str) -> str | None:
        got = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return got.stdout.strip() if got.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return "uncommitted" if head is None else head + ("-dirty" if git("status", "--porcelain", "-uno") else "")


KEYS = ("model", "workload", "engine", "metric", "value", "unit", "law2", "commit", "date", "device", "versions")


def as_record(row: dict[str, Any]) -> dict[str, Any]:
    """A row in the form of bench/records: a number as value, a metric that names the variant, the rest under `detail`."""
    detail = {k: v for k, v in row.items() if k not in KEYS}
    metric = [row["metric"]]
    if row["metric"] == "best_time" and "split" in detail:
        never = detail["split"] >= 1 << 30
        metric += [detail["tile"].split()[0], "" if never else f"split{detail['split']}"]
    if "arithmetic" in detail:
        metric.append("_".join(re.findall(r"[a-z0-9]+", detail["arithmetic"].lower())))
    if "splits" in detail:
        metric.append(f"s{detail['splits']}")
    if "reduced_precision_reduction" in detail:
        metric.append("reduced" if detail["reduced_precision_reduction"] else "unreduced")
    out = {k: row[k] for k in KEYS} | {"metric": "_".join(m for m in metric if m)}
    if isinstance(row["value"], dict):  # sizes at which a library's bits are not ours, by split count; the value counts those of one chain
        detail |= {"unlike": row["value"]}
        out["value"] = detail["unlike_s1"]
    detail.pop("unequal", None)
    return out | ({"detail": detail} if detail else {})


@dataclass
class Record:
    """Collects rows: all of them in all.jsonl; those for bench/records in digest.jsonl, in its form."""

    path: Path
    device: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        if torch.cuda.is_available():
            versions |= {"cuda": str(torch.version.cuda), "cublas": cublas_version()}
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower())
        self.common = {"commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": device, "versions": versions}

    def add(
        self,
        workload: str,
        metric: str,
        value: Any,
        unit: str,
        model: str = "kernel",
        engine: str = "twinfer-probe",
        law2: bool | None = None,
        digest: bool = False,
        **more: Any,
    ) -> None:
        row = dict(model=model, workload=workload, engine=engine, metric=metric, value=value, unit=unit, law2=law2, **more, **self.common)
        self.rows.append(row)
        with open(self.path / "all.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
        if digest:
            with open(self.path / "digest.jsonl", "a") as f:
                f.write(json.dumps(as_record(row)) + "\n")


def cublas_version() -> str:
    try:
        from importlib.metadata import version

        return version("nvidia-cublas")
    except Exception:  # not every build of torch carries the package
        return "unknown"


def processes() -> int:
    return max(1, min(14, len(os.sched_getaffinity(0)) - 1))


def attempt(f: Callable[[], float]) -> float | None:
    try:
        return f()
    except Exception as e:  # out of shared memory and the like: told, not fatal
        print("not timed:", type(e).__name__, str(e)[:160], flush=True)
        return None
