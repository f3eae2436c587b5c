"""Draws records as bars: a row a model, a column a workload, a bar an engine, a dashed line the floor. `python -m twinfer.bench.plot --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinfer.bench.record import Record, RecordError, latest, read
from twinfer.bench.roofline import CEILINGS, workload_floor
from twinfer.bench.shapes import SHAPES, shape_config
from twinfer.bench.workloads import FIRST, WORKLOADS, workload

# What is written above a panel: the figure that its workload is about, and which way is better.
TITLES = {
    "out_tok_s": "output tokens / s\nhigher is better",
    "tpot_ms": "ms per output token\nlower is better",
    "ttft_ms": "ms to first token\nlower is better",
}
# Colours that stay apart in grey and for colour-blind eyes (Okabe and Ito), ours first.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
OURS = ("fast", "reference")
INK, FAINT = "#333333", "#bbbbbb"
FLOOR_DASHES = (0, (4, 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status 2 with one line on stderr when there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.plot", description="Draws records as bars with the floor of each workload.")
    parser.add_argument("records", type=Path, nargs="+", help="files of records, one JSON object a line")
    parser.add_argument("--out", type=Path, required=True, help="the PNG (or SVG, PDF) to write")
    options = parser.parse_args(arguments)
    try:
        draw([record for file in options.records for record in read(file)], options.out)
    except (OSError, RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def shown_metric(name: str) -> str | None:
    """The figure that the workload `name` is about; None for what is no workload of the load generator (probes)."""
    try:
        return workload(name).metric
    except ValueError:
        return None


def floor_of(record: Record) -> float | None:
    """The floor of a record's figure, where the shape and the device's ceilings are known."""
    if record.model not in SHAPES or record.device not in CEILINGS:
        return None
    return workload_floor(shape_config(record.model), workload(record.workload), CEILINGS[record.device]).get(record.metric)


def in_whole_columns(records: Sequence[Record]) -> list[Record]:
    """The records, a first round's under the name of the whole workload where its engine has no figure of the whole."""

    def key(record: Record, name: str) -> tuple[str, str, str, str]:
        return record.device, record.model, name, record.engine

    whole = {key(r, r.workload) for r in records}
    names = [(r, r.workload.removesuffix(FIRST)) for r in records]
    return [r if r.workload == name else replace(r, workload=name) for r, name in names if r.workload == name or key(r, name) not in whole]


def draw(records: Sequence[Record], out: Path) -> None:
    """Writes the figure. Raises ValueError when no record is a workload's main figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [r for r in latest(in_whole_columns(records)).values() if shown_metric(r.workload) == r.metric]
    if not chosen:
        raise ValueError("no record is the main figure of a workload: nothing to draw")
    models = sorted({(r.device, r.model) for r in chosen}, key=lambda m: (m[0], list(SHAPES).index(m[1]) if m[1] in SHAPES else -1, m[1]))
    engines = sorted({r.engine for r in chosen}, key=lambda e: (OURS.index(e) if e in OURS else len(OURS), e))
    # in the order of the table of workloads, the smaller versions after the others
    names = sorted({r.workload for r in chosen}, key=lambda n: ("_div" in n, list(WORKLOADS).index(n.partition("_div")[0]), n))
    figure, axes = pyplot.subplots(
        len(models), len(names), figsize=(max(4.5, 2.3 * len(names) + 0.6), 2.9 * len(models) + 1.2), squeeze=False, layout="constrained"
    )
    floors = False
    for line, (device, model) in enumerate(models):
        for place, name in enumerate(names):
            axis = axes[line][place]
            floors |= _panel(axis, [r for r in chosen if (r.device, r.model, r.workload) == (device, model, name)], engines)
            if place == 0:
                axis.set_ylabel(f"{model}\n{device}", color=INK, fontsize=10)
            if line == 0:
                axis.set_title(f"{name}\n{TITLES[workload(name).metric]}", color=INK, fontsize=9)
    handles: list[Any] = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[i % len(COLOURS)]) for i, _ in enumerate(engines)]
    labels = list(engines)
    if floors:
        handles.append(pyplot.Line2D([], [], color=INK, linewidth=1.6, linestyle=FLOOR_DASHES))
        labels.append("floor of the hardware")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _panel(axis: Any, records: Sequence[Record], engines: Sequence[str]) -> bool:
    """The bars of one model under one workload, each with its figure, on a scale of their own; whether a floor was drawn."""
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.set_xticks([])
    axis.set_yticks([])
    if not records:
        axis.spines["bottom"].set_visible(False)
        axis.text(0.5, 0.4, "not measured", transform=axis.transAxes, ha="center", color=FAINT, fontsize=9)
        return False
    present = sorted(records, key=lambda r: engines.index(r.engine))
    for place, record in enumerate(present):
        bar = axis.bar(place, record.value, 0.86, color=COLOURS[engines.index(record.engine) % len(COLOURS)])
        axis.bar_label(bar, labels=[_short(record.value)], fontsize=9, color=INK, padding=2)
    right = max(2.0, len(present)) - 0.4
    axis.set_xlim(-0.6, right + 0.5)
    axis.margins(y=0.14)
    floor = floor_of(present[0])
    if floor is None:
        return False
    axis.axhline(floor, color=INK, linewidth=1.6, linestyle=FLOOR_DASHES, zorder=3)
    axis.annotate(_short(floor), (right + 0.5, floor), (0, 3), textcoords="offset points", ha="right", fontsize=9, color=INK, style="italic")
    return True


def _short(value: float) -> str:
    """Three figures at least: 0.305, 4.07, 16.7, 7,512."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
