"""Runs workloads on an engine, prints a table and, with --record, adds the figures to the records. `python -m twinfer.bench.run --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from twinfer.bench.load import Outcome, Peer, closed_loop, run_workload
from twinfer.bench.models import BUNDLED, Model, limits_for, load_model, reference_engine, transformers_model
from twinfer.bench.peers import EnginePeer, TransformersPeer
from twinfer.bench.record import RECORDS, UNITS, Record, append, current_commit, device_slug, package_versions, today
from twinfer.bench.roofline import CEILINGS, workload_floor
from twinfer.bench.shapes import SHAPES
from twinfer.bench.workloads import WORKLOADS, Workload, workload
from twinfer.errors import TwinferError

ENGINES = ("reference", "transformers")
SHOWN = ("out_tok_s", "tpot_ms", "tpot_ms_p99", "ttft_ms", "ttft_ms_p99", "done", "errors")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Bad input is one line on stderr and exit status 2; a run with failed requests ends with 1."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (TwinferError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m twinfer.bench.run",
        description="Measures an engine under a workload: output tokens a second, time to first token, time between tokens.",
        epilog=f"workloads: {', '.join(WORKLOADS)}; each also N times smaller as NAME_divN",
    )
    parser.add_argument("--model", default=str(BUNDLED), help=f"checkpoint directory, or a shape with random weights: {', '.join(SHAPES)} (default: bundled)")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="may be given several times (default: reference)")
    parser.add_argument("--workload", action="append", help="may be given several times (default: bs1_128_256)")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide requests, concurrency and lengths by N; the name gets _divN")
    parser.add_argument("--rate", type=float, help="open loop: this many requests a second, Poisson, instead of the workload's closed loop")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="default: the model's own")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU (default: torch's own choice); kept in the notes")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of arrivals")
    parser.add_argument("--max-step-tokens", type=int, default=8192, help="tokens of a step of our engine")
    parser.add_argument("--record", action="store_true", help=f"add the figures to {RECORDS.name}/<device>.jsonl")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--notes", help="a text to keep with the records")
    return parser


def _run(options: argparse.Namespace) -> int:
    chosen = [workload(name).scaled(options.scale) for name in options.workload or ["bs1_128_256"]]
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, options.dtype, options.device, options.seed)
    device = device_slug(options.device)
    table = Table(title=f"{model.name} on {device}")
    for column in ("workload", "engine", *SHOWN):
        table.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    records: list[Record] = []
    failed = False
    for load in chosen:
        for engine in options.engine or ["reference"]:
            outcome = measure(model, engine, load, options.rate, options.seed, options.max_step_tokens)
            figures = outcome.metrics()
            table.add_row(load.name, engine, *(_shown(figures.get(name)) for name in SHOWN))
            records += make_records(model, engine, load, figures, device, options)
            for served in outcome.errors[:3]:
                failed = True
                print(f"error: {load.name}, {engine}, request {served.key}: {served.error}", file=sys.stderr)
        if device in CEILINGS:
            floor = workload_floor(model.config, load, CEILINGS[device], options.max_step_tokens)
            table.add_row(load.name, "floor", *(_shown(floor.get(name)) for name in SHOWN), style="dim")
    Console(width=None if sys.stdout.isatty() else 150).print(table)  # a file has no width to fit
    if options.record and not failed:
        for file in append(records, options.records):
            print(f"{len(records)} records added to {file}")
    elif options.record:
        print("nothing recorded: requests failed", file=sys.stderr)
    return 1 if failed else 0


def measure(model: Model, engine: str, load: Workload, rate: float | None = None, seed: int = 0, max_step_tokens: int = 8192) -> Outcome:
    """One run of one workload on a fresh engine, after a warm-up of other prompts that no figure contains."""
    vocab_size = model.config.vocab_size
    warm = Workload("warm_up", min(4, load.concurrency), load.concurrency, load.prompt, type(load.output)(1, 2)).items(vocab_size)
    if engine == "reference":
        ours = reference_engine(model, limits_for(load, max_step_tokens))
        peer: Peer = EnginePeer(ours)
    else:
        peer = TransformersPeer(transformers_model(model), load.concurrency)
    closed_loop(peer, warm, load.concurrency)
    if engine == "reference":
        ours.scheduler.pool.drop_cached()
    return run_workload(peer, load, vocab_size, rate=rate, seed=seed)


def make_records(model: Model, engine: str, load: Workload, figures: dict[str, float], device: str, options: argparse.Namespace) -> list[Record]:
    """One record a figure. law2 is None: neither engine here claims the same bits in every batch (a CPU's sums depend on the number of rows)."""
    dtype = str(next(iter(model.weights.values())).dtype).removeprefix("torch.")
    notes = [dtype]
    if model.random_seed is not None:
        notes.append("random weights")
    if options.device == "cpu":
        notes.append(f"{torch.get_num_threads()} threads")
    if options.rate is not None:
        notes.append(f"open loop at {options.rate:g} requests/s")
    if options.notes:
        notes.append(options.notes)
    name = load.name if options.rate is None else f"{load.name}_rate{options.rate:g}"
    return [
        Record(
            model=model.name,
            workload=name,
            engine=engine,
            metric=metric,
            value=round(value, 4),
            unit=UNITS[metric],
            law2=None,
            commit=current_commit(),
            date=today(),
            device=device,
            versions=package_versions("twinfer", "torch", "transformers"),
            notes="; ".join(notes),
            seed=options.seed,
        )
        for metric, value in figures.items()
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
