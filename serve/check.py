"""`twinfer check`: gates over an engine that can be run on any model and device. What law 2 says and how it is looked at is invariants/gates/law2.py's."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.count import Count
from twinfer.limits import Limits, ceil_div
from twinfer.serve import options as o
from twinfer.serve.backend import Backend, choose
from twinfer.serve.failure import FAILED, BadInput, say
from twinfer.serve.model import CHOICES, DEFAULT, Model, find
from twinfer.serve.prompt import random_ids
from twinfer.serve.threads import check_threads, set_threads

if TYPE_CHECKING:
    from twinfer.engine.engine import Engine
    from twinfer.invariants.gates.law2 import Finding


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: prompt lengths, tokens generated after each, and what Law2 takes. `buckets` are few, as every engine captures all of them."""

    lengths: tuple[int, ...]
    num_tokens: int
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    page_size: int
    max_step_tokens: int
    buckets: tuple[int, ...]


# Lengths: one token; below and above a page, two pages, a split of 256 (attention's) and a chunk of 1000. In each size one of them outgrows the pages of
# its prompt with what it generates (60 of 64, 7 of 8), so that somebody is preempted.
FULL = Size((1, 60, 130, 300, 1024), 16, (8, 64, 256), (16, 64, 1000), 64, 2048, (1, 8, 64, 256))
QUICK = Size((1, 60, 130), 8, (8, 64), (16, 64), 64, 512, (1, 8, 64))
SNAPSHOTS = 8  # of states, in a model that keeps them: a prompt is found again behind one
# For Triton's interpreter, which takes a tenth of a second for each token of the smallest model.
INTERPRETED = Size((7, 10), 3, (4,), (4,), 8, 64, (1, 2, 4))


def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Model directory, or a bundled model: {CHOICES}.")] = DEFAULT,
    law2: Annotated[bool, typer.Option("--law2", help="The same bits of a token's logits in every schedule.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter prompts, batches of up to 64; always so in Triton's interpreter.")] = False,
    random_weights: o.RandomWeightsOption = None,
    dtype: o.DtypeOption = None,
    device: o.DeviceOption = None,
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Check on this device that the fast engine keeps a law, to the bit.

    --law2: requests are run alone; then the same requests without graphs, in
    batches, in chunks, in mixed steps, behind every number of their pages in
    the prefix cache, and after preemption. At every position the logits must
    have the same bits. It needs a GPU, or TRITON_INTERPRET=1 and a very small
    model.

    Exit code 1 if a schedule gives other bits, or did not come about.

    Examples:

      $ twinfer check --law2
      $ twinfer check --law2 ./Qwen3-8B/config.json --random-weights 1 --quick
      $ TRITON_INTERPRET=1 twinfer check --law2 micro
    """
    if not law2:
        raise BadInput("check: nothing to check was named; give --law2, the one check that there is")
    place = find(model, random_seed=random_weights)
    check_threads(threads)
    config = ModelConfig.from_file(place.path)
    name = config.dtype if dtype is None else dtype_name(dtype)
    choice = choose(Backend.FAST, device, config, name)
    size = fitting(INTERPRETED if choice.device == "cpu" else QUICK if quick else FULL, config)
    set_threads(config.num_parameters, threads)
    if not quiet:
        say(f"law 2 of {place.name} on the fast engine, {choice.device}, {name}: prompts of {', '.join(map(str, size.lengths))} tokens")
    findings = []
    for finding in run_law2(place, size, name, choice.device, random_weights):
        findings.append(finding)
        if not quiet:
            say(f"{finding.schedule}: {verdict(finding)}")
    if as_json:
        for finding in findings:
            print(json.dumps({**_record(finding), "model": place.name, "dtype": name, "device": choice.device}))
    else:
        _print_table(findings, f"law 2, fast engine, {place.name}, {name}, {choice.device}")
    failed = [finding for finding in findings if not finding.holds]
    if failed or not findings:
        names = ", ".join(finding.schedule for finding in failed)
        say(f"error: law 2 does not hold in {len(failed)} of {Count(len(findings), 'schedule')}{f': {names}' if names else ''}")
        raise typer.Exit(FAILED)


def fitting(size: Size, config: ModelConfig) -> Size:
    """The lengths that the model's context holds. Raises BadInput where none is left that can be found in the prefix cache."""
    from dataclasses import replace

    most = config.max_position - size.num_tokens
    lengths = tuple(length for length in size.lengths if length <= most)
    if not lengths or lengths[-1] <= size.page_size:
        raise BadInput(
            f"max_position_embeddings = {config.max_position}: too short for this check, whose prompts must be longer than a page of {size.page_size}"
        )
    return replace(size, lengths=lengths)


def run_law2(model: Model, size: Size, dtype: str, device: str, random_seed: int | None) -> Iterable[Finding]:
    """The gate over the fast engine, one finding a schedule as they come. Every engine is opened anew, over the same weights."""
    import torch

    from twinfer.fast.engine import Engine as FastEngine
    from twinfer.invariants.gates.law2 import Law2

    config = ModelConfig.from_file(model.path)

    def make(limits: Limits, graphs: bool) -> Engine:
        gc.collect()  # engine and tap know each other: the weights of the engine before would stay
        if device != "cpu":
            torch.cuda.empty_cache()
        return FastEngine.from_pretrained(
            model.path, limits=limits, dtype=dtype, device=device, tokenizer=False, random_seed=random_seed, graphs=graphs
        )

    prompts = [random_ids(length, length, config.vocab_size) for length in size.lengths]
    limits = _limits(size, config)
    return Law2(make, limits, prompts, num_tokens=size.num_tokens, batches=size.batches, chunks=size.chunks).run()


def _limits(size: Size, config: ModelConfig) -> Limits:
    """Room for the largest batch. Its strangers are as long as a prompt at most, half as long on average; who finds no page waits, or takes one."""
    batch, context = size.buckets[-1], size.lengths[-1] + size.num_tokens
    pages = sum(ceil_div(length + size.num_tokens + 2, size.page_size) for length in size.lengths)
    return Limits(
        max_batch=batch,
        max_step_tokens=size.max_step_tokens,
        max_chunk_tokens=size.max_step_tokens,
        warmup_tokens=1,
        max_context=context,
        max_step_context=batch * context,
        max_logit_tokens=max(16, min(batch, 256)),
        page_size=size.page_size,
        num_pages=ceil_div(pages * batch, len(size.lengths)),
        look_ahead=1,
        buckets=size.buckets,
        num_state_slots=batch if config.num_gdn_layers else 0,
        num_snapshots=SNAPSHOTS if config.num_gdn_layers else 0,
    )


def verdict(finding: Finding) -> str:
    """What came of a schedule, in a word or two."""
    if finding.holds:
        return "holds"
    return "BROKEN" if finding.different else "did not come about"


def _record(finding: Finding) -> dict[str, Any]:
    first = finding.different[0] if finding.different else None
    return {
        "schedule": finding.schedule,
        "positions": finding.num_positions,
        "differing": len(finding.different),
        "first": None if first is None else {"request": first[0], "position": first[1]},
        "verdict": verdict(finding),
    }


def _print_table(findings: list[Finding], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 140, markup=False, highlight=False)
    console.print(title)
    table = Table()
    for column in ("schedule", "positions", "differing", "first that differs", "verdict"):
        table.add_column(column, justify="right" if column in ("positions", "differing") else "left")
    for record in map(_record, findings):
        first = record["first"]
        where = "-" if first is None else f"request {first['request']}, position {first['position']}"
        table.add_row(record["schedule"], str(record["positions"]), str(record["differing"]), where, record["verdict"])
    console.print(table)
