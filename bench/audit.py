"""What the run-time check costs of a decode step: its own time, and the step's with it and without. Times only; nothing is asserted.

python -m twinfer.bench.audit [--model qwen3-8b] [--rows 64] [--record]

What counts as the check: the auditor before and after a step, the loop's laws, and those of the arrays that executors read. The target is 2 % of a decode
step of 64 rows on a GPU. The check of step n + 1 runs while step n computes, so beside its own time stands what a step takes
when nothing is checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from twinfer.bench.models import fast_engine, load_model, reference_engine
from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, today
from twinfer.engine import flatten, loop
from twinfer.engine.engine import Engine
from twinfer.limits import Limits, ceil_div
from twinfer.sampling import SamplingParams

PROMPT, WARM, BLOCK = 128, 5, 20  # tokens of each prompt; steps before the clock, and under it, before check and no check take turns


def limits_for(rows: int, steps: int, page_size: int) -> Limits:
    """Room for `rows` requests of PROMPT tokens that decode for `steps` steps and more, none of which waits."""
    context = PROMPT + num_steps(steps) + 32
    return Limits(
        max_batch=rows, max_step_tokens=max(rows, 2048), max_chunk_tokens=max(rows, 2048), warmup_tokens=1, max_context=context,
        max_step_context=rows * context, max_logit_tokens=256, page_size=page_size, num_pages=rows * (context // page_size + 1), look_ahead=1,
    )  # fmt: skip


def measure(engine: Engine, rows: int, steps: int) -> dict[str, float]:
    """Medians over `steps` decode steps of `rows` rows and as many unchecked ones: microseconds of the check, milliseconds of a step with it and without."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=num_steps(steps) + 24, temperature=0.0, ignore_eos=True)
    for _ in range(rows):
        engine.add([rng.randrange(engine.model.vocab_size) for _ in range(PROMPT)], params)
    while any(s.num_generated == 0 for s in (*engine.scheduler.running(), *engine.scheduler.waiting())):
        engine.step()
    places: list[tuple[Any, str]] = [(engine.auditor, "audit"), (engine.auditor, "check_output"), (loop, "loop_state"), (loop, "check"), (flatten, "check")]
    calls = [getattr(owner, name) for owner, name in places]
    spent = [0.0]

    def timed(call: Any) -> Any:
        def under(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent[0] += time.perf_counter() - start

        return under

    def put(changed: Iterable[Any]) -> None:
        for (owner, name), call in zip(places, changed, strict=True):
            setattr(owner, name, call)

    checks: list[float] = []
    walls: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * ceil_div(steps, BLOCK)):  # turn about, since contexts grow
        checked = block % 2 == 0
        put(timed(call) if checked else lambda *arguments: None for call in calls)
        for step in range(WARM + BLOCK):
            spent[0], start = 0.0, time.perf_counter()
            engine.step()
            if step >= WARM:
                walls[checked].append(time.perf_counter() - start)
                checks += [spent[0]] if checked else []
    put(calls)
    check, wall, without = (statistics.median(times) for times in (checks, walls[True], walls[False]))
    return {"check_us": check * 1e6, "step_ms": wall * 1e3, "step_unchecked_ms": without * 1e3, "check_share_percent": 100 * check / wall}


def num_steps(steps: int) -> int:
    """Steps that `measure` runs after the prompts."""
    return 2 * ceil_div(steps, BLOCK) * (WARM + BLOCK)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.audit", description="What the run-time check costs of a decode step.")
    parser.add_argument("--model", default="qwen3-8b", help="a shape with random weights, or a checkpoint directory (default: qwen3-8b)")
    parser.add_argument("--engine", choices=("fast", "reference"), default="fast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", action="store_true", help="add the figures to records/<device>.jsonl")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--commit", help="hash to record, where the code runs outside of its repository")
    options = parser.parse_args()
    model = load_model(options.model, device=options.device)
    fast = options.engine == "fast"
    engine = (fast_engine if fast else reference_engine)(model, limits_for(options.rows, options.steps, 64 if fast else 16))
    figures = measure(engine, options.rows, options.steps)
    engine.close()
    table = Table("metric", "value", title=f"{model.name}, {options.engine}, {options.rows} decode rows")
    for metric, value in figures.items():
        table.add_row(metric, f"{value:.3f}")
    Console(width=100).print(table)
    if options.record:
        append(
            [
                Record(
                    model=model.name, workload=f"audit_{options.rows}_rows", engine=options.engine, metric=metric, value=round(value, 4),
                    unit={"us": "us", "ms": "ms", "percent": "%"}[metric.rpartition("_")[2]], law2=None, commit=options.commit or current_commit(),
                    date=today(), device=device_slug(options.device), versions=package_versions("twinfer", "torch", "triton"), seed=0,
                )
                for metric, value in figures.items()
            ],
            options.records,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
