"""The plot command: a picture from records, one line of error without. Whether it is pleasant is for eyes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.test_record import GOOD
from twinfer.bench.plot import floor_of, in_whole_columns, main
from twinfer.bench.record import Record, append

pytest.importorskip("matplotlib")


def test_a_picture_of_several_models_engines_and_workloads(tmp_path: Path) -> None:
    bs1 = Record.from_dict(GOOD)
    many = replace(bs1, workload="conc64_128_256", metric="out_tok_s", unit="tok/s", value=7512.0)
    records = [bs1, replace(bs1, engine="transformers", value=44.7), many, replace(many, model="bundled-qwen3", device="cpu")]
    probe = replace(bs1, workload="copy 4096", metric="tb_s", unit="TB/s")
    files = append([*records, probe], tmp_path / "records")
    out = tmp_path / "new" / "bench.png"
    assert main([*map(str, files), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 10_000


def test_floors_are_known_for_real_shapes_on_measured_devices() -> None:
    record = Record.from_dict(GOOD)
    floor = floor_of(record)
    assert floor is not None
    assert floor < record.value
    assert floor_of(replace(record, device="cpu")) is None
    assert floor_of(replace(record, model="bundled-qwen3")) is None


def test_a_first_round_stands_in_the_whole_workloads_column() -> None:
    whole = Record.from_dict(GOOD)
    first = replace(whole, workload="bs1_128_256_first", engine="transformers", value=44.7)
    assert in_whole_columns([whole, first]) == [whole, replace(first, workload="bs1_128_256")]
    beside = replace(first, workload="bs1_128_256", value=45.0)
    assert in_whole_columns([first, beside]) == [beside]


def test_nothing_to_draw_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for file in (empty, tmp_path / "absent.jsonl"):
        assert main([str(file), "--out", str(tmp_path / "x.png")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
