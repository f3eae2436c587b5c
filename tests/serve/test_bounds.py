"""`twinfer bounds`: every bound once, figures that are the plan's, the same lines as docs/bounds.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import run
from twinfer.config import ModelConfig
from twinfer.invariants.bounds import BOUNDS, BY_NAME
from twinfer.invariants.report import report
from twinfer.invariants.resolve import resolve_limits
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.serve.model import bundled

NO_BOUNDS = {"weights", "step workspace", "runtime reserve"}


def listed(*arguments: str) -> dict[str, dict[str, Any]]:
    done = run("bounds", *arguments, "--json")
    assert done.code == 0, done.err
    records = [json.loads(line) for line in done.out.splitlines()]
    assert len({record["name"] for record in records}) == len(records)
    return {record["name"]: record for record in records}


def test_without_a_model_every_bound_has_its_formula() -> None:
    found = listed()
    assert set(found) == {bound.name for bound in BOUNDS}
    for bound in BOUNDS:
        record = found[bound.name]
        assert (record["formula"], record["demand"], record["why"]) == (str(bound.capacity), str(bound.demand), bound.why)
        assert "bytes" not in record


@pytest.mark.parametrize(
    "arguments", [["micro"], ["micro", "--device", "cpu"], ["qwen3", "--memory", "4GiB", "--max-batch", "7", "--dtype", "fp32"]], ids=" ".join
)
def test_the_figures_are_the_plans(arguments: list[str]) -> None:
    found = listed(*arguments)
    plan = json.loads(run("plan", *arguments, "--detail", "--json").out)
    assert {name: record["bytes"] for name, record in found.items() if record["bytes"]} == {b["name"]: b["bytes"] for b in plan["buffers"]}
    assert sum(record["bytes"] for record in found.values()) == sum(line["bytes"] for line in plan["lines"] if line["name"] not in NO_BOUNDS)
    for buffer in plan["buffers"]:
        assert found[buffer["name"]]["axes"] == buffer["shape"]
        assert found[buffer["name"]]["copies"] == buffer["copies"]


def test_capacities_are_the_formulas_at_the_limits() -> None:
    found = listed("micro", "--max-batch", "3", "--max-context", "512", "--page-size", "32")
    config = ModelConfig.from_file(bundled("micro").path)
    limits = resolve_limits(config, explicit={"max_batch": 3, "max_context": 512, "page_size": 32}, backend="fast", device="cuda").limits
    env = {**limit_env(limits, config), **model_env(config)}
    assert {name: record["capacity"] for name, record in found.items()} == {name: BY_NAME[name].capacity.evaluate(env) for name in found}
    assert found["rows"]["capacity"] == 3


def test_the_tables() -> None:
    short, long = run("bounds", "qwen3").out, run("bounds", "qwen3", "--why").out
    for bound in BOUNDS:
        assert re.search(rf"^\u2502 {bound.name} ", short, re.MULTILINE), bound.name
    for part in ("max_batch 256", "the scheduler's contract", "activations", "bytes", "in all, on the device"):
        assert part in short
        assert part in long
    assert "all copies" in run("bounds", "micro", "--device", "cpu").out
    flat = " ".join(long.split())
    for part in ("a step's demand", "largest_slot + 1", BY_NAME["rows"].why, "Once wrong: openinfer #403"):
        assert (part in flat, part in short) == (True, False), part
    formulas = run("bounds").out
    assert "elements" not in re.findall(r"^\u2503(.*)\u2503$", formulas, re.MULTILINE)[0]
    assert "max(max_chunk_tokens, 1 + speculative_tokens)" in formulas


def test_the_page_has_the_same_lines() -> None:
    page = report()
    for name, record in listed().items():
        assert f"`{name}` | {record['unit']} | `{record['demand']}` | `{record['formula']}` |" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-batch", "3"], "max_batch = 3: formulas have no numbers; give a MODEL, such as qwen3"),
        (["--memory", "4GiB"], "memory = '4GiB': formulas have no numbers"),
        (["--backend", "fast"], "backend = 'fast': formulas have no numbers"),
        (["micro", "--max-batch", "0"], "max_batch = 0"),
        (["micro", "--memory", "1MiB"], "too small"),
        (["no/such"], "model = 'no/such': no such directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("bounds", *arguments)
    assert (refused.code, said in refused.error_line, refused.out) == (2, True, "")
