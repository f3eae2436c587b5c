"""Records: one measured figure a JSON line, in records/<device>.jsonl, checked when written and when read. Not the measuring.

Lines are only ever added. A figure is known by (device, model, workload, engine, metric, commit, date); a plot takes the latest.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parent / "records"
KEYS = ("model", "workload", "engine", "metric", "value", "unit", "law2", "commit", "date", "device", "versions")
OPTIONAL = ("notes", "seed", "detail")
# The units of the metrics that the load generator gives; probes have others, in any unit.
UNITS = {
    "out_tok_s": "tok/s",
    "tpot_ms": "ms",
    "tpot_ms_p99": "ms",
    "ttft_ms": "ms",
    "ttft_ms_p99": "ms",
    "done": "requests",
    "errors": "requests",
}
_COMMIT = re.compile(r"(?:[0-9a-f]{7,40}|uncommitted)(?:-dirty)?")
_SLUG = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


class RecordError(ValueError):
    """A line that is not a record: names the place, the key and what was found."""


@dataclass(frozen=True, slots=True)
class Record:
    """One figure.

    law2      whether the run's arithmetic was batch-invariant to the bit; None where that was not checked or can't be said
    commit    hash of the code that ran, with "-dirty" when the tree had changes, or "uncommitted"
    date      day, YYYY-MM-DD, UTC
    versions  package -> version
    detail    further facts of the measurement (tile sizes, repetitions), by name
    """

    model: str
    workload: str
    engine: str
    metric: str
    value: float
    unit: str
    law2: bool | None
    commit: str
    date: str
    device: str
    versions: Mapping[str, str]
    notes: str | None = None
    seed: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "workload", "engine", "metric", "unit"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RecordError(f"{name} = {getattr(self, name)!r}: must be a text that is not empty")
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise RecordError(f"value = {self.value!r}: must be a finite number")
        if self.metric in UNITS and self.unit != UNITS[self.metric]:
            raise RecordError(f"unit = {self.unit!r}: {self.metric} is in {UNITS[self.metric]}")
        if not (self.law2 is None or isinstance(self.law2, bool)):
            raise RecordError(f"law2 = {self.law2!r}: must be true, false or null")
        if not isinstance(self.commit, str) or not _COMMIT.fullmatch(self.commit):
            raise RecordError(f"commit = {self.commit!r}: must be 7 to 40 hex digits or 'uncommitted', '-dirty' where the tree had changes")
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise RecordError(f"date = {self.date!r}: must be YYYY-MM-DD") from None
        if not isinstance(self.device, str) or not _SLUG.fullmatch(self.device):
            raise RecordError(f"device = {self.device!r}: must be lower-case letters, digits and single hyphens")
        if not isinstance(self.versions, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in self.versions.items()):
            raise RecordError(f"versions = {self.versions!r}: must map names to texts")
        if not (self.notes is None or isinstance(self.notes, str)):
            raise RecordError(f"notes = {self.notes!r}: must be a text")
        if isinstance(self.seed, bool) or not (self.seed is None or isinstance(self.seed, int)):
            raise RecordError(f"seed = {self.seed!r}: must be an integer")
        if not isinstance(self.detail, Mapping):
            raise RecordError(f"detail = {self.detail!r}: must be an object")

    @classmethod
    def from_dict(cls, data: object) -> Record:
        """Raises RecordError for a missing or unknown key or a bad value."""
        if not isinstance(data, dict):
            raise RecordError(f"a record is an object, this is {type(data).__name__}")
        missing = [key for key in KEYS if key not in data]
        unknown = [key for key in data if key not in KEYS + OPTIONAL]
        if missing or unknown:
            raise RecordError(f"missing keys {missing}, unknown keys {unknown}; keys are {', '.join(KEYS)}, optional {', '.join(OPTIONAL)}")
        return cls(**data)

    def to_json(self) -> str:
        """The line, in the order of KEYS; optional keys only where they say something."""
        data = asdict(self)
        return json.dumps({key: data[key] for key in KEYS} | {key: data[key] for key in OPTIONAL if data[key] not in (None, {})})


def append(records: Iterable[Record], directory: Path = RECORDS) -> list[Path]:
    """Adds each record to `<directory>/<device>.jsonl`; gives the files written."""
    by_file: dict[Path, list[str]] = {}
    for record in records:
        by_file.setdefault(directory / f"{record.device}.jsonl", []).append(record.to_json())
    directory.mkdir(parents=True, exist_ok=True)
    for file, lines in by_file.items():
        with file.open("a", encoding="utf-8") as out:
            out.write("".join(line + "\n" for line in lines))
    return list(by_file)


def read(file: Path) -> list[Record]:
    """Every record of a file. Raises RecordError naming file and line."""
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(Record.from_dict(json.loads(line)))
        except ValueError as error:  # JSONDecodeError and RecordError both are
            raise RecordError(f"{file}:{number}: {error}") from None
    return records


def latest(records: Iterable[Record]) -> dict[tuple[str, str, str, str, str], Record]:
    """The last record of each (device, model, workload, engine, metric), by date and then by place."""
    found: dict[tuple[str, str, str, str, str], Record] = {}
    for record in records:
        key = (record.device, record.model, record.workload, record.engine, record.metric)
        if key not in found or record.date >= found[key].date:
            found[key] = record
    return found


def slug(name: str) -> str:
    """A device's name as a file name: "NVIDIA H200" -> "nvidia-h200". Trademark signs and repeated hyphens go."""
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\((?:r|tm|c)\)", "", name.lower())).strip("-.") or "unknown"


def device_slug(device: str = "cpu") -> str:
    """The slug of the hardware behind a torch device string."""
    if device.startswith("cuda"):
        import torch

        return slug(torch.cuda.get_device_name(device))
    return slug(_cpu_model())


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def current_commit() -> str:
    """Hash of the checkout that this file lies in, "-dirty" added when files other than records differ; "uncommitted" outside of one."""
    root = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False, timeout=60)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "uncommitted"
    changes = git("status", "--porcelain", "--", ":/", ":(exclude,top)bench/records")
    return f"{commit}-dirty" if changes else commit


def today() -> str:
    """The day in UTC, so that records of machines in different zones sort."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def package_versions(*names: str) -> dict[str, str]:
    """Installed versions of packages, and Python's; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
