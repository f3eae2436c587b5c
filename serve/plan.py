"""`twinfer plan`: what a model takes of a memory, from config.json alone. The sums are invariants.memory's; no torch, no weights, no device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.serve import options as o
from twinfer.serve.backend import Backend
from twinfer.serve.model import CHOICES
from twinfer.serve.planned import KindOption, Planned, planned

if TYPE_CHECKING:
    from rich.table import Table

    from twinfer.invariants.memory import MemoryPlan


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Model directory, a config.json, or a bundled model: {CHOICES}.")],
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
    detail: Annotated[
        bool, typer.Option("--detail", help="Also show each line's formula, and list every buffer with its shape and why it is so large.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Show what a model takes of a memory, and what is left for pages. No GPU, no
    weights and no torch are needed.

    Every buffer has a stated bound, so the table is computed from config.json
    and the limits, not measured. Each limit is shown with where its value comes
    from: an argument, a TWINFER_ variable, the model, the memory, or a default.
    --detail adds the formulas and the buffers one by one.

    Examples:

      $ twinfer plan qwen3 --memory 4GiB
      $ twinfer plan ./Qwen3-8B --memory 141GiB
      $ twinfer plan ./Qwen3-8B/config.json --memory 80GB --max-batch 16
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
    found = planned(model, memory=memory, dtype=dtype, backend=backend, device=device, explicit=explicit)

    from twinfer.invariants.memory import plan_memory

    resolved = found.resolved
    made = plan_memory(found.config, resolved.limits, found.dtype, resolved.budget_bytes, backend=found.engine, device=device)
    buffers = _buffers(found.config, made, found.dtype, found.engine) if detail else None
    if as_json:
        print(json.dumps(_record(found, made, buffers)))
        return
    _print_tables(found, made, buffers)


def _buffers(config: ModelConfig, made: MemoryPlan, dtype: str, engine: str) -> list[dict[str, Any]]:
    """Every buffer that the engine counts against the budget: shape as a formula and in numbers, copies, bytes of them all, and why."""
    from twinfer.invariants.bound import concrete_dtype
    from twinfer.invariants.bounds import BUFFERS
    from twinfer.invariants.memory import counted_bytes
    from twinfer.invariants.symbols import limit_env, model_env

    env = {**limit_env(made.limits, config), **model_env(config)}
    return [
        {
            "name": bound.name,
            "bytes": counted_bytes(bound, env, dtype, engine),
            "dtype": concrete_dtype(bound.dtype, dtype),
            "shape": list(bound.axes(env)),
            "formula": " x ".join(f"({axis})" if " + " in str(axis) else str(axis) for axis in bound.shape),
            "copies": 1 if engine == "fast" else bound.num_copies(env, engine),
            "why": bound.why,
        }
        for bound in BUFFERS
        if counted_bytes(bound, env, dtype, engine)
    ]


def _record(found: Planned, made: MemoryPlan, buffers: list[dict[str, Any]] | None) -> dict[str, Any]:
    limits = made.limits
    record = {
        "model": found.place.name,
        "dtype": found.dtype,
        "engine": found.engine,
        "device": found.device,
        "assumed": list(found.config.assumed),
        "budget": made.budget,
        "total": made.total,
        "host": made.host_bytes,
        "free": None if made.budget is None else made.budget - made.total,
        "lines": [{"name": line.name, "bytes": line.bytes, "note": line.note} for line in made.lines],
        "pages": {
            "num_pages": limits.num_pages,
            "page_size": limits.page_size,
            "page_bytes": made.page_bytes,
            "tokens": made.page_tokens,
            "contexts": limits.num_pages // limits.pages_per_context,
        },
        "snapshots": {"num_snapshots": limits.num_snapshots, "snapshot_bytes": made.snapshot_bytes, "grid": limits.snapshot_grid}
        if limits.num_state_slots
        else None,
        "limits": {name: {"value": getattr(limits, name), "provenance": source} for name, source in found.resolved.provenance.items()},
    }
    return record if buffers is None else {**record, "buffers": buffers}


def _print_tables(found: Planned, made: MemoryPlan, buffers: list[dict[str, Any]] | None) -> None:
    from rich.console import Console

    from twinfer.invariants.memory import SNAPSHOT_PART
    from twinfer.invariants.size import format_bytes

    # A pipe has no width; figures that are cut to 80 columns would be lost.
    console = Console(width=None if Console().is_terminal else 150, markup=False, highlight=False)
    limits = made.limits
    detail = buffers is not None
    provenance = found.resolved.provenance
    # Not as a title, which wraps at the width of its table.
    console.print(f"memory of {found.place.name}, {found.dtype}, {found.engine} engine, {found.device}")
    if found.config.assumed:
        console.print(f"config.json does not say, so transformers' defaults count: {', '.join(found.config.assumed)}")
    table = new_table("", "what", "> size", "> share", *(["formula"] if detail else []))
    whole = made.total if made.budget is None else made.budget

    def add(what: str, size: int, formula: str = "") -> None:
        table.add_row(what, format_bytes(size), f"{size / whole:.1%}", *([formula] if detail else []))

    for line in made.lines:
        add(line.name, line.bytes, line.note)
    table.add_section()
    add("total", made.total, "" if made.budget is None else f"of {format_bytes(made.budget)}")
    if made.budget is not None:
        add("free", made.budget - made.total, "less than one more page" if provenance["num_pages"] == "memory" else "")
    if made.host_bytes:
        table.add_section()
        add("on the host", made.host_bytes, "not in the total: pinned staging for each step in flight, and columns")
    console.print(table)
    if not detail:
        console.print("--detail shows the formulas and every buffer")
    console.print(
        f"{Count(limits.num_pages, 'page'):,} of {Count(limits.page_size, 'token'):,}, {format_bytes(made.page_bytes)} each, "
        f"with room for {Count(made.page_tokens, 'token'):,}: "
        f"{Count(limits.num_pages // limits.pages_per_context, 'context'):,} of {Count(limits.max_context, 'token'):,}"
    )
    if limits.num_state_slots:
        console.print(
            f"{Count(limits.num_state_slots, 'state slot'):,}: so many requests run at once. The model keeps states: a prompt is found in the prefix cache "
            f"where one was kept, at most at {Count(limits.num_snapshots, 'place'):,} ({Count(limits.num_snapshots, 'snapshot'):,}, "
            f"{format_bytes(made.snapshot_bytes)} each), always at a multiple of {Count(limits.snapshot_grid, 'token'):,}"
        )
        if provenance["num_snapshots"] == "memory" == provenance["num_pages"]:
            console.print(
                f"pages and snapshots share what state slots, other buffers and the pages of one longest request leave: snapshots get 1 part of {SNAPSHOT_PART}"
            )
    if made.budget is None:
        console.print("no memory was given (--memory 141GiB): the number of pages is a default, not what a machine leaves")
    table = new_table("limits", "limit", "> value", "from")
    for name, source in provenance.items():
        value = getattr(limits, name)
        shown = f"{value[0]} .. {value[-1]} ({len(value)} sizes)" if isinstance(value, tuple) else f"{value:,}"
        table.add_row(name, shown, source)
    console.print(table)
    if buffers:
        table = new_table("buffers", "buffer", "> bytes", "shape", "why")
        for row in buffers:
            numbers = " x ".join(f"{axis:,}" for axis in row["shape"])
            copies = f", {row['copies']} copies" if row["copies"] > 1 else ""
            table.add_row(row["name"], f"{row['bytes']:,}", f"{row['formula']} = {numbers}, {row['dtype']}{copies}", row["why"])
        console.print(table)


def new_table(title: str, *columns: str) -> Table:
    """A table; columns whose name begins with '> ' are numbers."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column.removeprefix("> "), justify="right" if column.startswith("> ") else "left", overflow="fold")
    return table
