"""Our adapters through the gates: the reference through all of them, the fast engine through as many as its device allows. transformers' is test_docs.py's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gates.runs import run_gates
from tests.gates.test_mutants import all_gates
from twinfer.invariants.gates import adapters

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
# A gate takes the interpreter a quarter of a minute and more, so this one: prefill, decode, and a hit that leaves one token of a page to compute.
INTERPRETED = ("test_prefix_cache.py::test_hits_around_a_page_boundary[1-1]",)


def test_the_reference_passes_every_gate(tmp_path: Path) -> None:
    outcome = run_gates(adapters.reference, tmp_path)
    assert outcome.code == pytest.ExitCode.OK, outcome.why
    assert outcome.tests("passed") | {"test_isolation.py::test_a_batch_gives_the_bits_of_single_requests"} == all_gates()
    assert outcome.tests("skipped") == {"test_isolation.py::test_a_batch_gives_the_bits_of_single_requests"}


def test_no_false_alarm_in_bfloat16(tmp_path: Path) -> None:
    """Of the gates whose verdict is a matter of tolerances."""
    outcome = run_gates(adapters.reference, tmp_path, "--twinfer-dtype", "bfloat16", gates=("test_golden.py", "test_mixed_steps.py"))
    assert outcome.code == pytest.ExitCode.OK, outcome.why
    assert len(outcome.gates) == 20
    assert set(outcome.gates.values()) == {"passed"}


def test_the_fast_engine_passes(tmp_path: Path) -> None:
    outcome = run_gates(adapters.fast, tmp_path, gates=INTERPRETED if DEVICE == "cpu" else ())
    assert outcome.code == pytest.ExitCode.OK, outcome.why
    assert outcome.tests("passed") == ({gate.partition("[")[0] for gate in INTERPRETED} if DEVICE == "cpu" else all_gates())
