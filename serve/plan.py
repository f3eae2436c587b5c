"""`twinfer plan`: what a model takes of a memory, from config.json alone. The sums are invariants.memory's; no torch, no weights, no device."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinfer.config import ModelConfig, dtype_name
from twinfer.errors import LimitError
from twinfer.serve import options as o
from twinfer.serve.backend import FAST_DTYPES, FAST_HEAD_DIMS, Backend
from twinfer.serve.failure import BadInput
from twinfer.serve.model import CHOICES, Model, find

if TYPE_CHECKING:
    from rich.table import Table

    from twinfer.invariants.memory import MemoryPlan
    from twinfer.invariants.resolve import Resolved

DEVICES = ("cuda", "cpu")


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Model directory, a config.json, or a bundled model: {CHOICES}.")],
    memory: o.MemoryOption = None,
    dtype: o.DtypeOption = None,
    backend: o.BackendOption = Backend.AUTO,
    device: Annotated[str, typer.Option("--device", metavar="KIND", help="cuda or cpu: whose runtime reserve counts; it need not be here.")] = "cuda",
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
    place = find(model, allow_config=True)
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
    budget = o.given_memory(memory)
    if device not in DEVICES:
        raise BadInput(f"device = {device!r}: must be one of {', '.join(DEVICES)}")
    config = ModelConfig.from_file(place.path)
    config.check_supported()
    name = config.dtype if dtype is None else dtype_name(dtype)
    engine = _engine(backend, device, config, name)

    from twinfer.invariants.memory import plan_memory
    from twinfer.invariants.resolve import resolve_limits

    def resolve(kind: str) -> Resolved:
        which = _engine(backend, kind, config, name)
        return resolve_limits(config, explicit=explicit, environ=os.environ, budget_bytes=budget, dtype=name, backend=which, device=kind)

    try:
        resolved = resolve(device)
    except LimitError as error:
        raise LimitError(f"{error}{_elsewhere(resolve, device)}") from None
    made = plan_memory(config, resolved.limits, name, resolved.budget_bytes, backend=engine, device=device)
    about = f"{engine} engine, {device}"
    if as_json:
        print(json.dumps(_record(place, name, engine, device, made, resolved, _buffers(config, made, name, engine) if detail else None)))
        return
    _print_tables(place, name, about, made, resolved, _buffers(config, made, name, engine) if detail else None)


def _elsewhere(resolve: Callable[[str], Resolved], device: str) -> str:
    """A remedy for what does not fit on `device`: another kind on which the same command does, or nothing. `resolve` raises where it does not."""
    from twinfer.invariants.memory import RUNTIME_RESERVE
    from twinfer.invariants.size import format_bytes

    for other in DEVICES:
        with contextlib.suppress(LimitError):
            if other != device and resolve(other):
                return f"; --device {other}, whose runtime reserve is {format_bytes(RUNTIME_RESERVE[other])}, would do"
    return ""


def _engine(backend: Backend, device: str, config: ModelConfig, dtype: str) -> str:
    """The engine that is planned for; neither Triton nor a GPU need be here. Raises BadInput for what it does not compute."""
    wrong = ""
    if dtype not in FAST_DTYPES:
        wrong = f"dtype = {dtype!r}: the fast engine computes in {', '.join(FAST_DTYPES)}; --backend reference has {dtype}"
    elif config.head_dim not in FAST_HEAD_DIMS:
        wrong = f"head_dim = {config.head_dim}: the fast engine has {', '.join(map(str, FAST_HEAD_DIMS))}; --backend reference has any"
    if backend is Backend.AUTO:
        backend = Backend.FAST if device == "cuda" and not wrong else Backend.REFERENCE
    if backend is Backend.FAST and wrong:
        raise BadInput(wrong)
    return backend.value


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


def _record(
    place: Model, dtype: str, engine: str, device: str, made: MemoryPlan, resolved: Resolved, buffers: list[dict[str, Any]] | None
) -> dict[str, Any]:
    limits = made.limits
    record = {
        "model": place.name,
        "dtype": dtype,
        "engine": engine,
        "device": device,
        "budget": made.budget,
        "total": made.total,
        "free": None if made.budget is None else made.budget - made.total,
        "lines": [{"name": line.name, "bytes": line.bytes, "note": line.note} for line in made.lines],
        "pages": {
            "num_pages": limits.num_pages,
            "page_size": limits.page_size,
            "page_bytes": made.page_bytes,
            "tokens": made.page_tokens,
            "contexts": limits.num_pages // limits.pages_per_context,
        },
        "limits": {name: {"value": getattr(limits, name), "provenance": source} for name, source in resolved.provenance.items()},
    }
    return record if buffers is None else {**record, "buffers": buffers}


def _print_tables(place: Model, dtype: str, about: str, made: MemoryPlan, resolved: Resolved, buffers: list[dict[str, Any]] | None) -> None:
    from rich.console import Console

    from twinfer.invariants.size import format_bytes

    # A pipe has no width; figures that are cut to 80 columns would be lost.
    console = Console(width=None if Console().is_terminal else 150, markup=False, highlight=False)
    limits = made.limits
    detail = buffers is not None
    console.print(f"memory of {place.name}, {dtype}, {about}")  # not as a title, which wraps at the width of its table
    table = _table("", "what", "> size", "> share", *(["formula"] if detail else []))
    whole = made.total if made.budget is None else made.budget

    def add(what: str, size: int, formula: str = "") -> None:
        table.add_row(what, format_bytes(size), f"{size / whole:.1%}", *([formula] if detail else []))

    for line in made.lines:
        add(line.name, line.bytes, line.note)
    table.add_section()
    add("total", made.total, "" if made.budget is None else f"of {format_bytes(made.budget)}")
    if made.budget is not None:
        add("free", made.budget - made.total, "less than one more page" if resolved.provenance["num_pages"] == "memory" else "")
    console.print(table)
    if not detail:
        console.print("--detail shows the formulas and every buffer")
    console.print(
        f"{limits.num_pages:,} pages of {limits.page_size} tokens, {format_bytes(made.page_bytes)} each, hold {made.page_tokens:,} tokens: "
        f"{limits.num_pages // limits.pages_per_context:,} contexts of {limits.max_context:,} tokens"
    )
    if made.budget is None:
        console.print("no memory was given (--memory 141GiB): the number of pages is a default, not what a machine leaves")
    table = _table("limits", "limit", "> value", "from")
    for name, source in resolved.provenance.items():
        value = getattr(limits, name)
        shown = f"{value[0]} .. {value[-1]} ({len(value)} sizes)" if isinstance(value, tuple) else f"{value:,}"
        table.add_row(name, shown, source)
    console.print(table)
    if buffers:
        table = _table("buffers", "buffer", "> bytes", "shape", "why")
        for row in buffers:
            numbers = " x ".join(f"{axis:,}" for axis in row["shape"])
            copies = f", {row['copies']} copies" if row["copies"] > 1 else ""
            table.add_row(row["name"], f"{row['bytes']:,}", f"{row['formula']} = {numbers}, {row['dtype']}{copies}", row["why"])
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A table; columns whose name begins with '> ' are numbers."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column.removeprefix("> "), justify="right" if column.startswith("> ") else "left", overflow="fold")
    return table
