"""Prints the catalogue of faults as a table, or writes docs/faults.md.

python -m twinfer.invariants.faults                 a table on standard output
python -m twinfer.invariants.faults FILE            writes FILE
python -m twinfer.invariants.faults --check FILE    exit status 1 when FILE is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path

from twinfer.invariants.faults.catalogue import CATALOGUE, page


def table() -> str:
    """One line a fault: name, what it does, where it was seen, the gates that catch it."""
    rows = [("fault", "what it does", "seen in", "gates"), *((f.name, f.what, f.link or "-", ", ".join(f.red)) for f in CATALOGUE)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) + "  " + row[3] for row in rows)


def main(arguments: list[str]) -> int:
    """Exit status: 0 printed, written or current, 1 stale, 2 not understood."""
    match arguments:
        case []:
            print(table())
        case ["--check", name]:
            file = Path(name)
            if not file.is_file() or file.read_text(encoding="utf-8") != page():
                print(f"{file} is not current; run: python -m twinfer.invariants.faults {file}", file=sys.stderr)
                return 1
        case [name] if not name.startswith("-"):
            Path(name).write_text(page(), encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
