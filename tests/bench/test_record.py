"""Records: every line in the repository is one, what is written comes back, what is no record is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinfer.bench.record import KEYS, RECORDS, Record, RecordError, append, current_commit, device_slug, latest, package_versions, read, slug, today

GOOD: dict[str, Any] = {
    "model": "qwen3-8b",
    "workload": "bs1_128_256",
    "engine": "reference",
    "metric": "tpot_ms",
    "value": 5.14,
    "unit": "ms",
    "law2": None,
    "commit": "0123456789ab",
    "date": "2026-01-31",
    "device": "nvidia-h200",
    "versions": {"torch": "2.11.0"},
}


def test_every_line_of_the_repository_is_a_record() -> None:
    for file in sorted(RECORDS.glob("*.jsonl")):
        for record in read(file):
            assert file.name == f"{record.device}.jsonl", f"{file}: holds a record of {record.device}"


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    first = Record.from_dict(GOOD)
    second = Record.from_dict(GOOD | {"device": "cpu", "notes": "shared machine", "seed": 3, "detail": {"rounds": 5}})
    files = append([first, second, first], tmp_path)
    assert sorted(f.name for f in files) == ["cpu.jsonl", "nvidia-h200.jsonl"]
    append([second], tmp_path)
    assert read(tmp_path / "nvidia-h200.jsonl") == [first, first]
    assert read(tmp_path / "cpu.jsonl") == [second, second]
    line = (tmp_path / "nvidia-h200.jsonl").read_text().splitlines()[0]
    assert tuple(json.loads(line)) == KEYS


@pytest.mark.parametrize(
    "change",
    [
        {"value": "5"},
        {"value": float("nan")},
        {"value": True},
        {"unit": "s"},
        {"unit": ""},
        {"model": ""},
        {"law2": 1},
        {"commit": "main"},
        {"date": "31.1.2026"},
        {"date": 20260131},
        {"device": "NVIDIA H200"},
        {"versions": {"torch": 2}},
        {"notes": 4},
        {"seed": 1.5},
        {"detail": [1]},
        {"speed": 1},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_what_is_no_record_is_refused_with_its_place(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(RecordError, match=rf"bad.jsonl:2: .*{next(iter(change))}"):
        read(file)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_required(tmp_path: Path, key: str) -> None:
    with pytest.raises(RecordError, match=key):
        Record.from_dict({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize("line", ["", "nonsense", "[]", "3", '{"model": '])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(RecordError, match=r"bad.jsonl:1"):
        read(file)


def test_the_latest_figure_wins() -> None:
    old = Record.from_dict(GOOD | {"date": "2026-01-01", "value": 9})
    new = Record.from_dict(GOOD)
    again = Record.from_dict(GOOD | {"value": 4})
    other = Record.from_dict(GOOD | {"engine": "fast"})
    assert list(latest([new, again, old, other]).values()) == [again, other]


def test_device_names() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "intel-xeon-platinum-8481c-cpu-2.70ghz"
    assert slug("  ") == "unknown"
    Record.from_dict(GOOD | {"device": device_slug("cpu"), "commit": current_commit(), "date": today(), "versions": package_versions("torch", "absent")})


def test_versions_leave_out_what_is_not_installed() -> None:
    assert set(package_versions("torch", "no-such-package")) == {"python", "torch"}
