"""`twinfer bounds`: every bound as a table, with its formula and, for a model, in numbers. The lines are invariants.listing's, those of docs/bounds.md too."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.serve import options as o
from twinfer.serve.backend import Backend
from twinfer.serve.failure import BadInput
from twinfer.serve.model import CHOICES
from twinfer.serve.planned import KindOption, Planned, planned

if TYPE_CHECKING:
    from twinfer.invariants.listing import BoundLine


def bounds(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help=f"Model directory, a config.json, or a bundled model: {CHOICES}. Without one: formulas only.", show_default=False
        ),
    ] = None,
    memory: o.MemoryOption = None,
    dtype: o.DtypeOption = None,
    backend: o.BackendOption = Backend.AUTO,
    device: KindOption = "cuda",
    max_context: o.MaxContextOption = None,
    max_batch: o.MaxBatchOption = None,
    max_step_tokens: o.MaxStepTokensOption = None,
    max_chunk_tokens: o.MaxChunkTokensOption = None,
    max_step_context: o.MaxStepContextOption = None,
    max_logit_tokens: o.MaxLogitTokensOption = None,
    page_size: o.PageSizeOption = None,
    num_pages: o.NumPagesOption = None,
    why: Annotated[bool, typer.Option("--why", help="Also show what a step asks of each bound, its buffer's shape, and why it is so large.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    """List every bound: what it counts, its formula, who holds the buffer and,
    for a model, how large it is. No GPU, no weights and no torch are needed.

    The formulas are the objects that allocate, check every step, plan memory
    and are proven. Bytes are those that `twinfer plan` counts: on its device
    for the fast engine, all copies for the reference. Options and limits are
    those of `twinfer plan`.

    Examples:

      $ twinfer bounds
      $ twinfer bounds qwen3 --memory 4GiB
      $ twinfer bounds ./Qwen3-8B/config.json --max-batch 16 --why
    """
    explicit = o.given_limits(
        max_context=max_context,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=max_chunk_tokens,
        max_step_context=max_step_context,
        max_logit_tokens=max_logit_tokens,
        page_size=page_size,
        num_pages=num_pages,
    )
    from twinfer.invariants.listing import bound_lines
    from twinfer.invariants.symbols import limit_env, model_env

    if model is None:
        needless = {**explicit, "memory": memory, "dtype": dtype, "backend": None if backend is Backend.AUTO else backend.value}
        for name, value in needless.items():
            if value is not None:
                raise BadInput(f"{name} = {value!r}: formulas have no numbers; give a MODEL, such as qwen3")
        _show(bound_lines(), None, why, as_json)
        return
    found = planned(model, memory=memory, dtype=dtype, backend=backend, device=device, explicit=explicit)
    env = {**limit_env(found.resolved.limits, found.config), **model_env(found.config)}
    _show(bound_lines(env, found.dtype, found.engine), found, why, as_json)


def _show(lines: list[BoundLine], found: Planned | None, why: bool, as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(_record(line, found)))
        return
    _print_tables(lines, found, why)


def _record(line: BoundLine, found: Planned | None) -> dict[str, Any]:
    """One object a bound; `formula` is the capacity's, `capacity` its value for a model."""
    record = dataclasses.asdict(line)
    record["formula"], numbers = record.pop("capacity"), record.pop("numbers")
    return record if found is None else {**record, **numbers, "engine": found.engine, "model": found.place.name}


def _print_tables(lines: list[BoundLine], found: Planned | None, why: bool) -> None:
    from rich.console import Console

    from twinfer.invariants.listing import by_group, shared_reasons
    from twinfer.invariants.size import format_bytes
    from twinfer.serve.plan import new_table

    # A pipe has no width; formulas that are cut to 80 columns would be lost.
    console = Console(width=None if Console().is_terminal else 180, markup=False, highlight=False)
    if found is not None:
        limits = found.resolved.limits
        console.print(f"bounds of {found.place.name}, {found.dtype}, {found.engine} engine, {found.device}")
        console.print(", ".join(f"{name} {getattr(limits, name):,}" for name in found.resolved.provenance if name != "buckets"))
    for title, held in by_group(lines):
        numbers = ["> capacity", "> elements", "> bytes"] if found is not None else []
        demand, shape = (["a step's demand"], ["shape (n: the capacity)"]) if why else ([], [])
        table = new_table(title, "bound", "unit", *demand, "capacity, as a formula", *numbers, *shape, "held by")
        for line in held:
            figures = [] if line.numbers is None else [line.numbers.capacity, line.numbers.elements or None, line.numbers.bytes or None]
            made = [f"{line.shape}, {line.dtype}" if line.dtype else "-"] if why else []
            asked = [line.demand] if why else []
            table.add_row(line.name, line.unit, *asked, line.capacity, *("-" if n is None else f"{n:,}" for n in figures), *made, line.held or "-")
        console.print(table)
        if why:
            for names, reason, history in shared_reasons(held):
                console.print(f"{', '.join(names)}: {reason}{f' Once wrong: {history}.' if history else ''}")
    if found is not None:
        total = sum(line.numbers.bytes for line in lines if line.numbers is not None)
        where = "on the device" if found.engine == "fast" else "all copies"
        console.print(f"{total:,} bytes ({format_bytes(total)}) in all, {where}; weights and the runtime reserve come on top (twinfer plan)")
