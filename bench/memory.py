"""Holds the memory plan against what a GPU has lost: after start-up, and after steps as large as the limits allow. It times nothing.

python -m twinfer.bench.memory [--model qwen3-8b] [--record]

The plan says what weights, buffers and the runtime reserve take; the card's free memory, asked of the driver, says what the process took, its context,
modules and graphs included. Plan minus taken is to be within 1 % of the card.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, today
from twinfer.bench.shapes import SHAPES, shape_source
from twinfer.errors import TwinferError
from twinfer.invariants.gates.law2 import drain
from twinfer.invariants.memory import MemoryPlan, plan_memory
from twinfer.sampling import SamplingParams

CONTEXT = 16384  # tokens of max_context: room for the largest step and more


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes at one moment: what the process took of the card, what torch's allocator holds and has given out, and blocks given out so far."""

    when: str
    taken: int
    reserved: int
    allocated: int
    num_blocks: int

    @classmethod
    def now(cls, when: str) -> Taken:
        torch.cuda.synchronize()
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        blocks = torch.cuda.memory_stats()["allocation.all.allocated"]
        return cls(when, total - free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), blocks)


def measure(model: str) -> tuple[MemoryPlan, int, list[Taken]]:
    """The plan of an engine that takes the whole card, bytes of the card, and what was taken after each of several largest steps."""
    from twinfer.fast.engine import Engine as FastEngine

    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = [Taken.now("context")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape_source(model)), encoding="utf-8")
        engine = FastEngine.from_pretrained(folder, random_seed=0, tokenizer=False, limits={"max_context": CONTEXT})
    found.append(Taken.now("start-up"))
    limits, rng = engine.limits, random.Random(0)
    plan = plan_memory(engine.model, limits, "bfloat16", backend="fast", device="cuda")

    def run(when: str, num_requests: int, length: int, **params: Any) -> None:
        for _ in range(num_requests):
            engine.add([rng.randrange(engine.model.vocab_size) for _ in range(length)], SamplingParams(max_tokens=8, ignore_eos=True, **params))
        drain(engine)
        found.append(Taken.now(when))

    run(f"a chunk of {limits.max_chunk_tokens} tokens", 1, limits.max_chunk_tokens)
    run(f"{limits.max_batch} rows", limits.max_batch, 60)
    run("filters, penalties, log probabilities", limits.max_batch, 60, top_k=20, top_p=0.9, presence_penalty=0.1, logit_bias={5: 1.0}, logprobs=5)
    run("log probabilities of a prompt", 1, limits.max_chunk_tokens, prompt_logprobs=5)
    engine.close()
    return plan, torch.cuda.mem_get_info()[1], found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.memory", description="The memory plan against a GPU's free memory.")
    parser.add_argument("--model", default="qwen3-8b", help=f"a shape with random weights: {', '.join(SHAPES)} (default: qwen3-8b)")
    parser.add_argument("--record", action="store_true", help="add the figures to records/<device>.jsonl")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--commit", help="hash to record, where the code runs outside of its repository")
    options = parser.parse_args()
    if options.model not in SHAPES:
        parser.error(f"--model {options.model!r}: a shape is wanted: {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        print("error: there is no GPU, and a CPU's memory is not counted this way", file=sys.stderr)
        return 2
    try:
        plan, total, found = measure(options.model)
    except TwinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(*("after", "taken MiB", "allocator holds", "given out", "blocks so far", "plan - taken", "of the card"), title=options.model)
    for moment in found:
        gap = plan.total - moment.taken
        figures = (moment.taken, moment.reserved, moment.allocated)
        table.add_row(moment.when, *(f"{n / 2**20:.1f}" for n in figures), str(moment.num_blocks), f"{gap / 2**20:.1f}", f"{100 * gap / total:.2f} %")
    console = Console(width=140)
    console.print(table)
    reserve = plan.lines[-1].bytes
    beyond = max(moment.taken for moment in found) - (plan.total - reserve)
    console.print(f"plan {plan.total / 2**20:.1f} MiB with a reserve of {reserve / 2**20:.1f}; taken beyond weights and bounds: {beyond / 2**20:.1f} MiB")
    if options.record:
        last = found[-1]
        detail = {moment.when: {"taken": moment.taken, "reserved": moment.reserved, "allocated": moment.allocated} for moment in found}
        shared = {"engine": "fast", "law2": None, "commit": options.commit or current_commit(), "date": today(), "device": device_slug("cuda"),
                  "versions": package_versions("twinfer", "torch", "triton"), "detail": detail, "seed": 0}  # fmt: skip
        values = {"plan_bytes": plan.total, "taken_bytes": last.taken, "beyond_bounds_bytes": beyond}
        records = [
            Record(model=options.model, workload="memory", metric=metric, value=value, unit="bytes", **shared)  # type: ignore[arg-type]
            for metric, value in values.items()
        ]
        append(records, options.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
