"""Records what the host costs: one step's plan, audit, flatten and page list at 256 x 16k, and `twinfer --help`. Times only; nothing is asserted.

python -m twinfer.bench.host [--steps N] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twinfer.bench.host_step import PARTS, HostStep
from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, today

WORKLOAD = "host_step_256x16k"
MEASURED = PARTS[:4]  # plan, audit, flatten, page list
COUNTED = PARTS[:3]  # what the target of 300 us counts: an executor with the page table on its device reads no page list


def step_times(num_steps: int) -> dict[str, list[float]]:
    """Microseconds of each part and of their sum, one entry a step, after 50 steps of warm-up."""
    host = HostStep(room=num_steps + 256)
    times: dict[str, list[float]] = {part: [] for part in (*MEASURED, "sum", "sum_with_page_list")}
    for step in range(num_steps + 50):
        spent = {}
        for part in MEASURED:
            start = time.perf_counter()
            host.run(part)
            spent[part] = (time.perf_counter() - start) * 1e6
        host.advance_to("plan")
        if step >= 50:
            for part, microseconds in spent.items():
                times[part].append(microseconds)
            times["sum"].append(sum(spent[part] for part in COUNTED))
            times["sum_with_page_list"].append(sum(spent.values()))
    return times


def help_ms(repeats: int = 5) -> float:
    """Median milliseconds of `twinfer --help` in a process of its own."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-m", "twinfer.serve", "--help"], check=True, capture_output=True)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.host", description="Host time of a step, and of --help.")
    parser.add_argument("--steps", type=int, default=1000, help="steps to time (default: 1000)")
    parser.add_argument("--record", action="store_true", help="add the figures to records/<device>.jsonl")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--notes", help="a text to keep with the records")
    options = parser.parse_args()
    figures: list[tuple[str, str, float, str]] = []
    for part, times in step_times(options.steps).items():
        figures.append((WORKLOAD, f"{part}_us_median", statistics.median(times), "us"))
        figures.append((WORKLOAD, f"{part}_us_p10", sorted(times)[len(times) // 10], "us"))
    figures.append(("cli_help", "wall_ms_median", help_ms(), "ms"))
    table = Table("workload", "metric", "value", "unit")
    for workload, metric, value, unit in figures:
        table.add_row(workload, metric, f"{value:.1f}", unit)
    Console().print(table)
    if options.record:
        shared = {"engine": "host", "law2": None, "commit": current_commit(), "date": today(), "device": device_slug(), "versions": package_versions()}
        records = [
            Record(model="qwen3-8b", workload=workload, metric=metric, value=round(value, 1), unit=unit, notes=options.notes, **shared)  # type: ignore[arg-type]
            for workload, metric, value, unit in figures
        ]
        append(records, options.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
