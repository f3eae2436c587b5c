"""pytest-benchmark files become records; anything else is one line of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinfer.bench.from_pytest import main
from twinfer.bench.record import read

COMMIT = {"id": "0123456789abcdef0123456789abcdef01234567", "dirty": True}


def entry(name: str, group: str) -> dict[str, Any]:
    extra = {"max_difference_nat": 1e-6, "model": "bundled-qwen3", "device": "a-cpu"}
    return {"name": name, "group": group, "stats": {"median": 2e-3, "min": 1e-3, "rounds": 7}, "extra_info": extra}


def test_medians_of_comparisons_become_records_of_their_own_commit_and_day(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    entries = [
        entry("test_prefill[reference-128]", "prefill 128 tokens"),
        entry("test_host_step[plan+audit]", "host, 256 decode rows at 16k"),
        entry("test_generate[fast]", "4 requests"),
        entry("test_operation[cublas-matmul-3]", "matmul M=64 N=6144 K=4096"),
    ]
    file.write_text(json.dumps({"benchmarks": entries, "commit_info": COMMIT, "datetime": "2026-01-31T08:00:45+00:00"}))
    assert main([str(file), "--records", str(tmp_path / "records")]) == 0
    prefill, *others = read(tmp_path / "records" / "a-cpu.jsonl")
    assert [(r.engine, r.workload) for r in others] == [("fast", "4_requests"), ("cublas", "matmul_m_64_n_6144_k_4096")]
    assert (prefill.model, prefill.device) == ("bundled-qwen3", "a-cpu")
    assert (prefill.workload, prefill.engine, prefill.metric, prefill.value) == ("prefill_128_tokens", "reference", "median_us", 2000.0)
    assert (prefill.commit, prefill.date) == ("0123456789ab-dirty", "2026-01-31")
    assert prefill.detail == {"rounds": 7, "min_us": 1000.0, "max_difference_nat": 1e-6}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmarks": [{}]}'])
def test_another_file_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    file.write_text(text)
    assert main([str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
