"""Every fault of the catalogue turns its gates red, every gate has one, and without a fault all are green. On a CPU, kernels in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fast.pair import DEVICE
from tests.faults.gates import RUNNERS, red, red_of
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.faults.__main__ import main
from twinfer.invariants.faults.catalogue import CATALOGUE, page
from twinfer.invariants.faults.fault import KINDS, Fault
from twinfer.invariants.faults.gate import GATES
from twinfer.invariants.faults.switch import StaleFault, edited
from twinfer.invariants.prove import Prover

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a wrong kernel that runs on a GPU may write anywhere")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
# These are green in the tests whose checks they are, which run more of the same.
ELSEWHERE = {"machine", "snapshots", "padding page", "sets in flight", "law 2"}


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_turns_its_gates_red(fault: Fault, record_property: Callable[[str, object], None]) -> None:
    with fault.on():
        found = red_of(fault.red)
    record_property("red", {gate: told[:300] for gate, told in found.items()})
    survived = [gate for gate in fault.red if gate not in found]
    assert not survived, f"{fault.name} ({fault.what}) survives {', '.join(survived)}; red: {', '.join(found) or 'none'}"


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate not in ELSEWHERE])
def test_without_a_fault_the_gate_is_green(gate: str) -> None:
    assert not red(gate)


def test_every_gate_has_a_fault_and_every_fault_a_gate() -> None:
    assert list(RUNNERS) == list(GATES)
    assert {gate for fault in CATALOGUE for gate in fault.red} == set(GATES)


def test_the_catalogue_is_what_the_issue_asks_for() -> None:
    names = [fault.name for fault in CATALOGUE]
    assert len(set(names)) == len(names) >= 40
    assert sum(bool(fault.link) for fault in CATALOGUE) >= 10
    assert {fault.kind for fault in CATALOGUE} == set(KINDS)
    for fault in CATALOGUE:
        assert fault.what.endswith("."), fault.name
        assert "|" not in fault.name + fault.what, "a table is made of them"
        assert not fault.link or fault.link.startswith("https://github.com/"), fault.link


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_that_is_switched_off_is_gone(fault: Fault) -> None:
    """Bounds, and what the auditor checks, are what they were; a fault that no longer applies would have said so."""
    bounds, checked = dict(BY_NAME), (Auditor.__init__.__kwdefaults__ or {})["bounds"]
    with fault.on():
        pass
    assert bounds == BY_NAME
    assert (Auditor.__init__.__kwdefaults__ or {})["bounds"] is checked


@pytest.mark.parametrize("fault", [fault for fault in CATALOGUE if fault.kind == "bound"], ids=lambda fault: fault.name)
def test_each_bound_that_a_fault_changes_is_refuted(fault: Fault) -> None:
    """By itself, where a fault changes several."""
    right = dict(BY_NAME)
    with fault.on():
        changed = [bound for name, bound in BY_NAME.items() if bound is not right[name]]
        prover = Prover()
        assert changed
        assert [bound.name for bound in changed if prover.bound(bound).verdict != "refuted"] == []


def test_a_fault_that_no_longer_applies_says_so() -> None:
    place = "twinfer.engine.pages:PagePool.share"
    for at, old in ((place, "no such fragment"), (place, "page"), (place + "d", "page")):
        with pytest.raises(StaleFault), edited(at, old, "")():
            pass


def test_the_catalogue_lists_without_torch() -> None:
    code = "import twinfer.invariants.faults.__main__, sys; bad = {'torch', 'triton', 'z3'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m twinfer.invariants.faults docs/faults.md"


def test_the_table_names_every_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CATALOGUE)
    for fault, line in zip(CATALOGUE, lines[1:], strict=True):
        assert line.startswith(fault.name)
        assert line.endswith(", ".join(fault.red))
    assert main(["--check", str(tmp_path / "none.md")]) == 1
    assert main(["--nonsense"]) == 2
