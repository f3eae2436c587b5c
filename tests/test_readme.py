"""The README is code: its Python runs, its commands are the ones CI runs, its picture is what `flatten` gives, its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.invariants import plans
from twinfer.config import ModelConfig
from twinfer.engine.flatten import Staging, flatten
from twinfer.engine.pretrained import MEMORY_FRACTION
from twinfer.golden import BUNDLED
from twinfer.invariants import resolve
from twinfer.table import PageTable

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    written = capsys.readouterr().out
    assert len(re.findall(r"[a-z]{2,}", written)) >= 20, f"no English came out: {written!r}"


@pytest.mark.parametrize("name", ["run", "test"])
def test_marked_commands_are_found(name: str) -> None:
    script = ROOT / "tools" / "readme_commands.py"
    printed = subprocess.run([sys.executable, str(script), str(ROOT / "README.md"), name], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("python3 -m venv .venv && ")
    assert printed in README


def test_an_unmarked_command_is_an_error() -> None:
    script = ROOT / "tools" / "readme_commands.py"
    done = subprocess.run([sys.executable, str(script), str(ROOT / "README.md"), "absent"], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "absent" in done.stderr


def test_every_page_is_linked_from_the_first_screen() -> None:
    first = README[: README.index("\n## ")]
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in first]


def test_links_within_the_readme_lead_to_its_sections() -> None:
    sections = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", README, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= sections


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    """Folders and files, with or without a star, from the root of the checkout; a file's bare name leads nowhere."""
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:[a-z_*]+/)+[a-z0-9_*-]*(?:\.[a-z]+)?|[a-z0-9_*]+\.py)`", text):
        assert any(ROOT.glob(name.rstrip("/"))), name


def drawn(name: str) -> list[int]:
    """The integers of one line of the picture of a step: between the line's name and the remark at its end."""
    (line,) = re.findall(rf"^{name}  .*$", README, re.MULTILINE)
    return [int(word) for word in re.findall(r"\d+", line[24:75])]


def test_the_picture_is_what_flatten_gives() -> None:
    start, length = drawn("context before"), drawn("new tokens")
    table = PageTable(np.zeros((3, 5), np.int32), np.zeros(3, np.int32))
    (line,) = re.findall(r"^page list  .*$", README, re.MULTILINE)
    lists = [[int(page) for page in line[at:to].split()] for at, to in ((24, 41), (41, 58), (58, 75))]
    slots, columns, pages = zip(*((row, i, page) for row, listed in enumerate(lists) for i, page in enumerate(listed)), strict=True)
    table.apply(plans.TableDelta(0, plans.i32(*slots), plans.i32(*columns), plans.i32(*pages), plans.i32(0, 1, 2), plans.i32(*map(len, lists))))
    plan = plans.plan(start=plans.i32(*start), length=plans.i32(*length), tokens=plans.i32(*drawn("token_ids")))
    staging = Staging(**{field.name: np.zeros(64, np.int64 if field.name == "write_slots" else np.int32) for field in fields(Staging)})
    flat = flatten(plan, table, 4, staging)
    for name in ("token_ids", "positions", "write_slots", "row_indptr", "page_indices", "page_indptr"):
        assert drawn(name) == getattr(flat, name).tolist(), name
    after = flat.context.tolist()
    (full,) = (lists[row][-1] for row, context in enumerate(after) if context % 4 == 0)
    assert drawn("commit") == [*after[:2], full, *after[2:]]
    references = re.search(r"(\d+) references to (\d+) pages", README)
    assert references is not None
    assert (int(references[1]), int(references[2])) == (len(flat.page_indices), len(set(flat.page_indices.tolist())))


def test_the_table_of_settings_is_the_code() -> None:
    """Names from invariants.resolve, and the defaults that it resolves for the bundled model, one column an engine."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    header = re.search(r"^\| variable \| (\w+) \| (\w+) \|", page, re.MULTILINE)
    assert header is not None
    assert header.groups() == tuple(resolve.DEFAULTS)
    rows = {name: shown for name, *shown in re.findall(r"^\| `(TWINFER_\w+)` \| (.+?) \| (.+?) \|", page, re.MULTILINE)}
    columns = []
    for backend in resolve.DEFAULTS:
        limits = resolve.resolve_limits(ModelConfig.from_file(BUNDLED), backend=backend).limits
        values = {field.name: getattr(limits, field.name) for field in fields(limits)}
        columns.append({resolve.PREFIX + name.upper(): f"{v[0]} .. {v[-1]}" if isinstance(v, tuple) else f"{v:,}" for name, v in values.items()})
    assert rows == {**{name: [column[name] for column in columns] for name in columns[0]}, **{name: ["-", "-"] for name in resolve.OTHER_VARIABLES}}
    assert f"{MEMORY_FRACTION:.0%}".replace("%", " %") in page
    # As the code reads them: each is taken, and one that is not in the table is refused.
    for name in rows:
        none = dict.fromkeys(("TWINFER_SPECULATIVE_TOKENS", "TWINFER_NUM_STATE_SLOTS", "TWINFER_NUM_SNAPSHOTS"), "0")
        text = {"TWINFER_MEMORY": "64GiB", "TWINFER_BUCKETS": "1,256", **none}.get(name, "1")
        environ = {name: text} if name != "TWINFER_MAX_STEP_CONTEXT" else {name: "4096"}
        for backend in resolve.DEFAULTS:
            resolve.resolve_limits(ModelConfig.from_file(BUNDLED), environ=environ, backend=backend)
    with pytest.raises(ValueError, match="TWINFER_MAX_BTACH"):
        resolve.resolve_limits(ModelConfig.from_file(BUNDLED), environ={"TWINFER_MAX_BTACH": "1"})


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = re.search(r"\| extra \| .*?\n\n", README, re.DOTALL)
    assert table is not None
    assert set(re.findall(r"^\| `(\w+)` \|", table[0], re.MULTILINE)) == set(extras)


def test_the_figures_of_the_hosts_share_were_recorded() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = r"plan ([\d.]+), audit ([\d.]+), flatten ([\d.]+), together ([\d.]+)\."
    told = re.search(rf"Recorded on `([\w-]+)` at commit `(\w+)`, medians in us: {figures}", page)
    assert told is not None
    lines = map(json.loads, (ROOT / "bench" / "records" / f"{told[1]}.jsonl").read_text(encoding="utf-8").splitlines())
    recorded = {r["metric"]: r["value"] for r in lines if r["workload"] == "host_step_256x16k" and r["commit"] == told[2]}  # the last of each
    assert [recorded[f"{part}_us_median"] for part in ("plan", "audit", "flatten", "sum")] == [float(value) for value in told.groups()[2:]]
    assert f"{recorded['sum_us_median']:.0f} us recorded" in README
