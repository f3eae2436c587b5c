"""Turns a file of `pytest bench --benchmark-json FILE` into records, the median of each comparison. The host's step has its own, host.py.

python -m twinfer.bench.from_pytest FILE
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinfer.bench.record import RECORDS, Record, append, package_versions, slug

ENGINES = ("reference", "transformers", "fast", "triton", "plain", "cublas")  # the last three are forms of an operation


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status 2 with one line on stderr for a file that is something else."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.from_pytest", description="Adds the medians of a pytest-benchmark file to the records.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--notes", help="a text to keep with the records")
    options = parser.parse_args(arguments)
    try:
        run = json.loads(options.file.read_text(encoding="utf-8"))
        records = [record for entry in run["benchmarks"] if (record := to_record(entry, run, options.notes)) is not None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {options.file}: not a pytest-benchmark file ({type(error).__name__}: {error})", file=sys.stderr)
        return 2
    for file in append(records, options.records):
        print(f"{len(records)} records added to {file}")
    return 0


def to_record(entry: Mapping[str, Any], run: Mapping[str, Any], notes: str | None) -> Record | None:
    """One comparison as a record, its group the workload and the first of its name's parameters the engine; None for what compares no engines.

    Commit and day are those of the `run`, which may lie back; model and device are what the comparison kept beside its figure.
    """
    found = re.search(rf"\[({'|'.join(ENGINES)})(?:-|\])", entry["name"])
    if found is None:
        return None
    stats, commit = entry["stats"], run["commit_info"]
    extra = dict(entry["extra_info"])
    return Record(
        model=extra.pop("model"),
        workload=slug(entry["group"]).replace("-", "_"),
        engine=found[1],
        metric="median_us",
        value=round(1e6 * stats["median"], 2),
        unit="us",
        law2=None,
        commit=f"{commit.get('id', '')[:12] or 'uncommitted'}{'-dirty' if commit.get('dirty') else ''}",
        date=run["datetime"][:10],
        device=extra.pop("device"),
        versions=package_versions("twinfer", "torch", "triton", "transformers", "numpy"),
        notes=notes,
        detail={"rounds": stats["rounds"], "min_us": round(1e6 * stats["min"], 2), **extra},
    )


if __name__ == "__main__":
    sys.exit(main())
