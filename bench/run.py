"""Runs workloads on engines, prints figures beside floors and peers, and with --record adds them to the records. `python -m twinfer.bench.run --help`.

An engine is built once for a model and serves all chosen workloads in turn, its prefix cache emptied in between; with --repeats N each is run N times
and the median counts. Whether the fast engine's bits hang on the batch is looked at before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from twinfer.bench.load import Outcome, Peer, closed_loop, run_workload
from twinfer.bench.models import BUNDLED, DISTRIBUTION, Model, fast_engine, limits_for, load_model, reference_engine, transformers_model
from twinfer.bench.peers import EnginePeer, TransformersPeer, batch_that_fits
from twinfer.bench.record import RECORDS, UNITS, Record, append, current_commit, device_slug, latest, package_versions, read, today
from twinfer.bench.roofline import CEILINGS, workload_floor
from twinfer.bench.shapes import SHAPES
from twinfer.bench.table import figure, text_table
from twinfer.bench.workloads import FIRST, WORKLOADS, Item, Span, Workload, workload
from twinfer.config import ModelConfig
from twinfer.engine.engine import Engine
from twinfer.errors import TwinferError
from twinfer.invariants.gates.law2 import Recorder, drain
from twinfer.sampling import SamplingParams

ENGINES = ("reference", "transformers", "fast")
SHOWN = ("out_tok_s", "tpot_ms", "tpot_ms_p99", "ttft_ms", "ttft_ms_p99", "done", "errors")
PEERS = ("vllm", "nano-vllm", "transformers")
# Prompts that touch every tile size of the kernels, so that none is compiled while a clock runs.
WARM_LENGTHS = (1, 12, 20, 40, 70, 100, 130, 200, 260, 400, 520, 800, 1100, 2100, 4200, 8192)


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload on one engine: the outcomes of its repeats. law2 as in Record; `remarks` for its notes."""

    engine: str
    load: Workload
    outcomes: tuple[Outcome, ...]
    law2: bool | None = None
    remarks: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """The median over the repeats of each figure that all of them have; of done requests the fewest, of errors the most."""
        runs = [outcome.metrics() for outcome in self.outcomes]
        found = {name: statistics.median(run[name] for run in runs) for name in runs[0] if all(name in run for run in runs)}
        return found | {"done": min(run["done"] for run in runs), "errors": max(run["errors"] for run in runs)}

    @property
    def failed(self) -> bool:
        return any(outcome.errors for outcome in self.outcomes)


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
        description="Measures engines under workloads: output tokens a second, time to first token, time between tokens.",
        epilog=f"workloads: {', '.join(WORKLOADS)}; each also N times smaller as NAME_divN. Lists are comma-separated, or the option is given again.",
    )
    shapes = ", ".join(SHAPES)
    parser.add_argument("--model", action="append", help=f"checkpoint directory, or a shape with random weights: {shapes} (default: bundled)")
    parser.add_argument("--engine", action="append", help=f"any of {', '.join(ENGINES)} (default: reference)")
    parser.add_argument("--workload", "--workloads", action="append", help="names, or all (default: bs1_128_256)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="run each workload N times; the median is shown and recorded, the rest kept beside")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="divide requests, concurrency and lengths by N; the name gets _divN")
    parser.add_argument("--first-round", action="store_true", help="only as many requests as are in flight at once; the name gets _first")
    parser.add_argument("--rate", type=float, help="open loop: this many requests a second, Poisson, instead of the workload's closed loop")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16", "float16"), help="default: the model's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--threads", type=int, help="threads of torch on a CPU (default: torch's own choice); kept in the notes")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and of arrivals")
    parser.add_argument("--max-step-tokens", type=int, default=8192, help="tokens of a step of our engines")
    parser.add_argument("--record", action="store_true", help=f"add the figures to {RECORDS.name}/<device>.jsonl, a workload at a time")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records to add to")
    parser.add_argument("--commit", help="hash to record, where the code runs outside of its repository")
    parser.add_argument("--notes", help="a text to keep with the records")
    return parser


def _listed(given: Sequence[str] | None, default: str) -> list[str]:
    return [name for text in given or [default] for name in text.split(",")]


def _run(options: argparse.Namespace) -> int:
    names = _listed(options.workload, "bs1_128_256")
    chosen = [workload(name).scaled(options.scale) for name in (WORKLOADS if names == ["all"] else names)]
    if options.first_round:
        chosen = [load.first_round() for load in chosen]
    engines = _listed(options.engine, "reference")
    unknown = [name for name in engines if name not in ENGINES]
    if unknown or options.repeats < 1:
        raise ValueError(f"engine {unknown[0]!r} is unknown; known: {', '.join(ENGINES)}" if unknown else f"repeats {options.repeats}: must be at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = device_slug(options.device)
    failed, summary = False, []
    for name in _listed(options.model, str(BUNDLED)):
        model = load_model(name, options.dtype, options.device, options.seed)
        found: list[Measured] = []
        for engine in engines:
            for measured in measure(model, engine, chosen, options.rate, options.seed, options.max_step_tokens, options.repeats):
                found.append(measured)
                failed |= _report(measured, model, device, options)
            _free_memory()
        summary += summary_rows(model.name, model.config, device, found, options.max_step_tokens)
        model.weights.clear()
    print()
    print(text_table(SUMMARY, summary, left=4))
    return 1 if failed else 0


def _report(measured: Measured, model: Model, device: str, options: argparse.Namespace) -> bool:
    """One line of figures, the first errors, and the records; whether requests failed."""
    shown = "  ".join(f"{name} {figure(measured.figures[name])}" for name in SHOWN if name in measured.figures)
    print(f"{model.name}  {measured.load.name}  {measured.engine}  {shown}", flush=True)
    for served in [served for outcome in measured.outcomes for served in outcome.errors][:3]:
        print(f"error: {measured.load.name}, {measured.engine}, request {served.key}: {served.error}", file=sys.stderr)
    if options.record and measured.failed:
        print("nothing recorded: requests failed", file=sys.stderr)
    elif options.record:
        records = make_records(model, measured, device, options)
        for file in append(records, options.records):
            print(f"{len(records)} records added to {file}")
    return measured.failed


def measure(
    model: Model, engine: str, loads: Sequence[Workload], rate: float | None = None, seed: int = 0, max_step_tokens: int = 8192, repeats: int = 1
) -> Iterator[Measured]:
    """Each workload on one engine, which is built once. Before its first run there is a warm-up of other prompts that no figure contains."""
    started = time.perf_counter()
    if engine == "transformers":
        theirs = transformers_model(model)
        for load in loads:
            batch = batch_that_fits(model, load)
            remarks = () if batch == load.concurrency else (f"batches of {batch}, for memory",)
            yield _measured(engine, partial(TransformersPeer, theirs, batch), model, load, rate, seed, repeats, None, remarks)
        return
    fast = engine == "fast"
    limits = limits_for(loads, max_step_tokens, fast=fast)
    with (fast_engine if fast else reference_engine)(model, limits) as ours:
        law2 = None
        if fast:
            law2 = bits_hold(ours)
            if model.device.type == "cuda":
                _compile(ours)
            print(f"{model.name}  fast engine ready in {time.perf_counter() - started:.1f} s, same bits in a batch: {law2}", flush=True)
        for load in loads:
            yield _measured(engine, partial(EnginePeer, ours), model, load, rate, seed, repeats, law2, (), ours)


def _measured(
    engine: str,
    make_peer: Callable[[], Peer],
    model: Model,
    load: Workload,
    rate: float | None,
    seed: int,
    repeats: int,
    law2: bool | None,
    remarks: tuple[str, ...],
    ours: Engine | None = None,
) -> Measured:
    vocab_size = model.config.vocab_size
    warm = Workload("warm_up", min(4, load.concurrency), load.concurrency, load.prompt, Span(1, 2)).items(vocab_size)
    outcomes = []
    for repeat in range(repeats):
        peer = make_peer()
        if repeat == 0:
            closed_loop(peer, warm, load.concurrency)
        if ours is not None:
            ours.scheduler.pool.drop_cached()
        gc.collect()
        outcomes.append(run_workload(peer, load, vocab_size, rate=rate, seed=seed))
    return Measured(engine, load, tuple(outcomes), law2, remarks)


def bits_hold(engine: Engine, num_tokens: int = 4) -> bool | None:
    """Whether a few requests get the same bits of logits alone and among strangers, as many as run at once: a glance at law 2, whose gate is longer.

    None where the engine's limits leave no room for company.
    """
    longest = engine.limits.max_context - num_tokens
    lengths = [min(length, longest) for length in (17, 64, 130)][: engine.limits.max_batch // 2]
    if not lengths or longest < 1:
        return None
    rng = random.Random(17)
    prompts = [[rng.randrange(engine.model.vocab_size) for _ in range(length)] for length in lengths]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prefix_cache, engine.scheduler.prefix_cache = engine.scheduler.prefix_cache, False
    names: dict[int, int] = {}
    recorder = Recorder(engine, names)
    try:
        for name, prompt in enumerate(prompts):
            names[engine.add(prompt, params)] = name
            drain(engine)
        alone = {key: set(values) for key, values in recorder.found.items()}
        for name, prompt in enumerate(prompts):
            names[engine.add(prompt, params)] = name
        for i in range(engine.limits.max_batch - len(prompts)):
            stranger = prompts[i % len(prompts)]
            engine.add([*stranger[-1:], *stranger[: i % len(stranger)]], replace(params, max_tokens=1 + i % num_tokens))
        drain(engine)
    finally:
        recorder.close()
        engine.scheduler.prefix_cache = prefix_cache
    return len(alone) == sum(lengths) + len(lengths) * (num_tokens - 1) and alone == recorder.found and all(len(v) == 1 for v in alone.values())


def _compile(engine: Engine) -> None:
    """Runs a prompt of every size class and a batch of them, so that all kernels are compiled."""
    rng = random.Random(23)
    longest = engine.limits.max_context - 2
    items = [Item(tuple(rng.randrange(engine.model.vocab_size) for _ in range(min(n, longest))), 2) for n in WARM_LENGTHS]
    for concurrency in (1, engine.limits.max_batch):
        closed_loop(EnginePeer(engine), items, concurrency)
        engine.scheduler.pool.drop_cached()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_records(model: Model, measured: Measured, device: str, options: argparse.Namespace) -> list[Record]:
    """One record a figure. law2 is None for engines that claim nothing (a CPU's sums depend on the number of rows)."""
    notes = [model.dtype]
    if model.random_seed is not None:
        notes.append(DISTRIBUTION)
    if options.device == "cpu":
        notes.append(f"{torch.get_num_threads()} threads")
    if options.rate is not None:
        notes.append(f"open loop at {options.rate:g} requests/s")
    notes += measured.remarks
    if options.notes:
        notes.append(options.notes)
    name = measured.load.name if options.rate is None else f"{measured.load.name}_rate{options.rate:g}"
    runs = [outcome.metrics() for outcome in measured.outcomes]
    return [
        Record(
            model=model.name,
            workload=name,
            engine=measured.engine,
            metric=metric,
            value=round(value, 4),
            unit=UNITS[metric],
            law2=measured.law2,
            commit=options.commit or current_commit(),
            date=today(),
            device=device,
            versions=package_versions("twinfer", "torch", "triton", "transformers"),
            notes="; ".join(notes),
            seed=options.seed,
            detail={"repeats": [round(run[metric], 4) for run in runs]} if len(runs) > 1 else {},
        )
        for metric, value in measured.figures.items()
    ]


SUMMARY = ("model", "workload", "metric", "engine", "figure", "floor", "of it", *(cell for peer in PEERS for cell in (peer, "speed")))


def summary_rows(model: str, config: ModelConfig, device: str, found: Iterable[Measured], max_step_tokens: int) -> list[list[str]]:
    """A row for each workload and engine: its main figure, the floor and how near to it (1.00 is the floor), and each peer's with our speed over theirs.

    Peers are what the repository's records of this device say, and transformers where it was measured beside.
    """
    listed = list(found)
    file = RECORDS / f"{device}.jsonl"
    recorded = latest(read(file)).values() if file.is_file() else ()
    known = {(r.workload, r.engine): r.value for r in recorded if r.model == model and r.metric == _metric(r.workload)}
    known |= {(m.load.name, m.engine): m.figures[m.load.metric] for m in listed if m.load.metric in m.figures}
    rows = []
    for measured in sorted(listed, key=lambda m: m.load.name):
        load, metric = measured.load, measured.load.metric
        value = measured.figures.get(metric)
        floor = workload_floor(config, load, CEILINGS[device], max_step_tokens).get(metric) if device in CEILINGS else None
        row = [model, load.name, metric, measured.engine, figure(value), figure(floor), _speed(metric, value, floor)]
        for peer in PEERS:
            theirs = known.get((load.name, peer), known.get((load.name + FIRST, peer))) if peer != measured.engine else None
            row += [figure(theirs), _speed(metric, value, theirs)]
        rows.append(row)
    return rows


def _metric(name: str) -> str:
    """The main figure of a workload by name; "" for what is none (probes)."""
    try:
        return workload(name).metric
    except ValueError:
        return ""


def _speed(metric: str, ours: float | None, theirs: float | None) -> str:
    """Our speed over theirs: above 1 we are the faster, whichever way the figure counts."""
    if ours is None or theirs is None or not ours or not theirs:
        return "-"
    return f"{(ours / theirs if metric == 'out_tok_s' else theirs / ours):.2f}"


if __name__ == "__main__":
    sys.exit(main())
