"""Turns a file of `pytest bench --benchmark-json FILE` into records: the median of each comparison. `python -m twinfer.bench.from_pytest FILE`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, slug, today

ENGINES = ("reference", "transformers", "fast")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status 2 with one line on stderr for a file that is something else."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.from_pytest", description="Adds the medians of a pytest-benchmark file to the records.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--notes", help="a text to keep with the records")
    options = parser.parse_args(arguments)
    try:
        benchmarks = json.loads(options.file.read_text(encoding="utf-8"))["benchmarks"]
        records = [to_record(entry, options.notes) for entry in benchmarks]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {options.file}: not a pytest-benchmark file ({type(error).__name__}: {error})", file=sys.stderr)
        return 2
    for file in append(records, options.records):
        print(f"{len(records)} records added to {file}")
    return 0


def to_record(entry: Mapping[str, Any], notes: str | None) -> Record:
    """One benchmark as a record: its group is the workload; a comparison's engine is the end of its name, what is no comparison is the host's."""
    name, stats = str(entry["name"]), entry["stats"]
    engine = next((e for e in ENGINES if re.search(rf"_{e}(\[|$)", name)), "host")
    parts = re.search(r"\[(.*)\]", name)
    return Record(
        model="bundled-qwen3" if engine != "host" else "qwen3-8b",
        workload=slug(entry["group"] or name).replace("-", "_"),
        engine=engine,
        metric=f"{parts[1].replace('+', '_')}_us" if engine == "host" and parts else "median_us",
        value=round(1e6 * stats["median"], 2),
        unit="us",
        law2=None,
        commit=current_commit(),
        date=today(),
        device=device_slug("cpu"),
        versions=package_versions("twinfer", "torch", "transformers", "numpy"),
        notes=notes,
        detail={"rounds": stats["rounds"], "min_us": round(1e6 * stats["min"], 2), **entry["extra_info"]},
    )


if __name__ == "__main__":
    sys.exit(main())
