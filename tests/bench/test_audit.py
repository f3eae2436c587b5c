"""The cost of the run-time check and the memory against its plan: what both tools give without a GPU. Their figures are records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from twinfer.bench import audit, memory
from twinfer.bench.models import load_model, reference_engine
from twinfer.bench.record import read
from twinfer.engine import flatten, loop
from twinfer.golden import MICRO


def test_both_kinds_of_step_are_run_and_the_check_is_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reference_engine(load_model(str(MICRO)), audit.limits_for(2, 3, 16))
    plans, arrays, laws, seen = engine.auditor.audit, flatten.check, loop.check, []
    monkeypatch.setattr(loop, "check", lambda *arguments: seen.append(laws(*arguments)))
    before = loop.check
    found = audit.measure(engine, 2, 3)
    assert set(found) == {"check_us", "step_ms", "step_unchecked_ms", "check_share_percent"}
    assert 0 < found["check_us"] < 1e3 * found["step_ms"]
    assert found["check_share_percent"] == pytest.approx(found["check_us"] / found["step_ms"] / 10)
    assert (engine.auditor.audit, flatten.check, loop.check) == (plans, arrays, before)
    # Twice in each step that is checked, which is every other one, and in the few before.
    assert audit.num_steps(3) <= len(seen) < 1.5 * audit.num_steps(3), "the loop's laws are not among what is timed and left out"
    assert engine.healthy, engine.lost
    engine.close()


def test_records_of_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["audit", "--model", str(MICRO), "--engine", "reference", "--device", "cpu", "--rows", "2", "--steps", "2", "--record", "--records", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", asked)
    assert audit.main() == 0
    assert "check_share_percent" in capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    assert [(record.workload, record.unit) for record in read(file)] == [("audit_2_rows", unit) for unit in ("us", "ms", "ms", "%")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is wrong where there is no GPU")
def test_memory_is_measured_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["memory"])
    assert memory.main() == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["memory", "--model", "qwen3-9b"])
    with pytest.raises(SystemExit):
        memory.main()
    assert "qwen3-9b" in capsys.readouterr().err
