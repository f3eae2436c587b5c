"""The records of public faults: each once, each name in them exists, the page is current. What they name is run by its own tests."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from twinfer.invariants.faults.known import KINDS, RECORDS, STATUSES, Known, main, page, problems, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "known_faults.md"
NUMBER = 155  # of records, when they were gathered
GOOD = Known("B1", "https://example.org/1", "an engine", "size", "A fault.", "covered", ("bound:page_indices", "law:page_list", "fault:pages leak"), "", "So.")


def test_every_record_is_there_once_and_what_it_names_exists() -> None:
    records = read()
    assert problems(records, ROOT) == []
    assert len({record.id for record in records}) == len({record.link for record in records}) == len(records) == NUMBER
    assert {record.kind for record in records} == set(KINDS)
    assert {record.status for record in records} == set(STATUSES)


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read()), "run: python -m twinfer.invariants.faults.known docs/known_faults.md"


def test_every_record_is_on_it_once() -> None:
    lines = page(read()).splitlines()
    for record in read():
        (row,) = (line for line in lines if f"]({record.link})" in line)
        assert record.fault in row
        assert all(name.partition(":")[2].removeprefix(":") in row for name in record.by)
        assert all("|" not in text for text in (record.fault, record.engine, record.why)), "would end a cell"


WRONG: dict[str, tuple[str, str]] = {
    "renamed test": ("tests/invariants/test_known.py::test_the_page_is_fresh", "no such test"),
    "helper": ("tests/invariants/test_known.py::named", "names no test"),
    "test without a file": ("tests/invariants/test_unknown.py::test_the_page_is_current", "no such file"),
    "file without a test": ("tests/invariants/test_known.py", "names no test"),
    "folder": ("tests/invariants::test_x", "no such file"),
    "file outside the tests": ("invariants/faults/known.py::test_x", "names no test"),
    "law": ("law:page_lists", "no such law"),
    "bound for a law": ("law:page_indices", "no such law"),
    "bound": ("bound:page_list", "no such bound"),
    "fault": ("fault:pages stay", "no such fault"),
    "word": ("everything", "names no test"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_name_is_told(what: str) -> None:
    name, told = WRONG[what]
    (problem,) = problems([replace(GOOD, by=(*GOOD.by, name))], ROOT)
    assert problem.startswith(f"B1: {name}: ")
    assert told in problem


def test_a_test_that_is_renamed_breaks_its_record(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "test_a.py"
    file.parent.mkdir()
    record = replace(GOOD, by=("tests/test_a.py::test_b",))
    file.write_text("def test_b() -> None: ...\n")
    assert problems([record], tmp_path) == []
    for text in ("def test_c() -> None: ...\n", "def outer() -> None:\n    def test_b() -> None: ...\n", "# def test_b\ntest_b = 1\n"):
        file.write_text(text)
        assert problems([record], tmp_path) == ["B1: tests/test_a.py::test_b: there is no such test in the file"]
    assert problems([record]) == [], "where no tests are installed"


MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "kind": ({"kind": "sizes"}, "kind 'sizes' is none of"),
    "status": ({"status": "done"}, "status 'done' is none of"),
    "covered by nothing": ({"by": ()}, "what covers it is named"),
    "not applicable and covered": ({"status": "not applicable"}, "what covers it is named"),
    "later for nothing": ({"status": "later", "by": ()}, "only what comes later waits"),
    "later for something unknown": ({"status": "later", "by": (), "waits_for": "better times"}, "only what comes later waits"),
    "covered and waiting": ({"waits_for": "speculation"}, "only what comes later waits"),
    "no link": ({"link": "example.org"}, "link 'example.org' is none"),
    "no reason": ({"why": ""}, "why is empty"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_fields_that_contradict_each_other_are_told(what: str) -> None:
    changes, told = MISFITS[what]
    assert problems([GOOD], ROOT) == []
    found = problems([replace(GOOD, **changes)], ROOT)  # type: ignore[arg-type]
    assert any(told in problem for problem in found), found


def test_a_record_twice_is_told() -> None:
    assert problems([GOOD, GOOD], ROOT) == ["id B1 is in 2 records", "link https://example.org/1 is in 2 records"]


@pytest.mark.parametrize("line", ["", "{", "[]", '{"id": "B1"}'])
def test_what_is_no_record_is_told_with_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "known.jsonl"
    file.write_text(RECORDS.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"known\.jsonl:{NUMBER + 1}: "):
        read(file)


def test_check_tells_a_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "known_faults.md"
    assert main(["--check", str(file)]) == 1
    assert main([str(file)]) == 0
    assert main(["--check", str(file)]) == 0
    file.write_text(file.read_text(encoding="utf-8").replace("covered", "uncovered", 1), encoding="utf-8")
    assert main(["--check", str(file)]) == 1
    assert "run: python -m twinfer.invariants.faults.known" in capsys.readouterr().err
    assert main([]) == main(["--help"]) == 2


def test_a_wheel_carries_the_records() -> None:
    carried = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["twinfer.invariants.faults"]
    assert any(RECORDS.match(pattern) for pattern in carried)
