"""A table as lines of plain text, columns aligned. No colours, no wrapping, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines for `rows` under `columns`; the first `left` columns are aligned to the left, the others, figures, to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def figure(value: float | None) -> str:
    """Three figures at least, thousands parted: 0.305, 4.07, 16.7, 7,512; "-" for none."""
    if value is None:
        return "-"
    size = abs(value)
    if value == int(value) or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"
