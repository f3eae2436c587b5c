"""`twinfer plan`: the figures are invariants.memory's, every limit has a provenance, and the plan is what the engine then takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.command import interpret, run
from tests.serve.test_examples import QWEN3_8B
from twinfer.config import ModelConfig
from twinfer.invariants.memory import plan_memory
from twinfer.invariants.resolve import DEFAULTS, resolve_limits
from twinfer.limits import Limits
from twinfer.reference.engine import Engine
from twinfer.serve.model import bundled


def planned(*arguments: str) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert done.code == 0, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(QWEN3_8B)
    return tmp_path


def test_the_figures_are_the_plans(large: Path) -> None:
    record = planned(str(large), "--memory", "141GiB")
    config = ModelConfig.from_file(large)
    budget = 141 * 2**30
    limits = resolve_limits(config, budget_bytes=budget, device="cuda", backend="fast").limits
    wanted = plan_memory(config, limits, "bfloat16", budget, device="cuda", backend="fast")
    assert record["lines"] == [{"name": line.name, "bytes": line.bytes, "note": line.note} for line in wanted.lines]
    assert (record["total"], record["budget"], record["free"]) == (wanted.total, budget, budget - wanted.total)
    assert sum(line["bytes"] for line in record["lines"]) == record["total"]
    assert 0 <= record["free"] < record["pages"]["page_bytes"]
    assert record["lines"][0] == {"name": "weights", "bytes": 2 * 8_190_735_360, "note": "8,190,735,360 parameters in bfloat16"}
    pages = record["pages"]
    assert pages["num_pages"] == limits.num_pages
    assert pages["tokens"] == limits.num_pages * limits.page_size
    assert pages["contexts"] == pages["tokens"] // 40960
    assert {name: entry["value"] for name, entry in record["limits"].items() if name != "buckets"} == {
        field: getattr(limits, field) for field in Limits.__slots__ if field != "buckets"
    }


def test_a_config_file_and_its_directory_are_one_model(large: Path) -> None:
    by_file, by_directory = planned(str(large / "config.json")), planned(str(large))
    assert {**by_file, "model": ""} == {**by_directory, "model": ""}


def test_provenance(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_MAX_CONTEXT", "8192")
    monkeypatch.setenv("TWINFER_MEMORY", "60GiB")
    record = planned(str(large), "--max-batch", "16", "--dtype", "bf16")
    limits = record["limits"]
    assert limits["max_batch"] == {"value": 16, "provenance": "argument"}
    assert limits["max_context"] == {"value": 8192, "provenance": "environment TWINFER_MAX_CONTEXT"}
    assert limits["num_pages"]["provenance"] == "memory"
    assert record["budget"] == 60 * 2**30
    monkeypatch.delenv("TWINFER_MAX_CONTEXT")
    monkeypatch.delenv("TWINFER_MEMORY")
    assert planned(str(large))["limits"]["max_context"] == {"value": 40960, "provenance": "model"}


def test_every_limit_option_is_heard() -> None:
    given = {
        "max_context": 512, "max_batch": 4, "max_step_tokens": 256, "max_chunk_tokens": 128, "max_step_context": 1024, "max_logit_tokens": 32,
        "page_size": 32, "num_pages": 77,
    }  # fmt: skip
    limits = planned("micro", *(word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))))["limits"]
    assert {name: limits[name] for name in given} == {name: {"value": value, "provenance": "argument"} for name, value in given.items()}


def test_the_plan_is_what_the_engine_takes() -> None:
    given = {"max_context": 512, "max_batch": 4, "max_step_tokens": 128, "num_pages": 40}
    record = planned(
        "micro", "--device", "cpu", "--detail", *(w for name, value in given.items() for w in ("--" + name.replace("_", "-"), str(value)))
    )
    with Engine.from_pretrained(bundled("micro").path, limits=given) as engine:
        held = {row.name: row.bytes for row in engine.ledger.rows() if row.bytes}
    listed = {buffer["name"]: buffer["bytes"] for buffer in record["buffers"]}
    for name in ("kv_keys", "kv_values"):
        assert held[name] == listed[name]
    assert set(held) <= set(listed)


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [([], "fast"), (["--device", "cpu"], "reference"), (["--dtype", "fp64"], "reference"), (["--backend", "fast"], "fast"),
     (["--backend", "reference"], "reference")],
)  # fmt: skip
def test_each_engine_has_its_own_plan(arguments: list[str], engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its defaults and its workspace; what it runs on need not be here, nor Triton."""
    monkeypatch.setattr("twinfer.serve.backend.has_triton", lambda: False)
    record = planned("micro", *arguments)
    assert record["engine"] == engine
    assert record["limits"]["max_batch"]["value"] == DEFAULTS[engine].max_batch
    assert record["limits"]["page_size"]["value"] == DEFAULTS[engine].page_size
    assert ("step workspace" in [line["name"] for line in record["lines"]]) is (engine == "reference")


def test_a_head_that_the_kernels_lack_is_planned_for_the_reference(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(QWEN3_8B.replace('"head_dim": 128', '"head_dim": 96'))
    assert planned(str(tmp_path))["engine"] == "reference"
    refused = run("plan", str(tmp_path), "--backend", "fast")
    assert (refused.code, "head_dim = 96: the fast engine has 64, 128, 256" in refused.error_line) == (2, True)


def test_the_fast_engine_on_a_cpu_is_planned_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, and nowhere else: the words are those of `generate`."""
    interpret(monkeypatch, False)
    words = ("--device", "cpu", "--backend", "fast")
    refused = run("plan", "micro", *words)
    assert (refused.code, "set TRITON_INTERPRET=1" in refused.error_line) == (2, True)
    assert refused.error_line == run("generate", "x", "--model", "micro", *words).error_line
    too_small = run("plan", "micro", "--backend", "fast", "--memory", "1GiB").error_line
    assert ("memory = 1.0 GiB: too small" in too_small, "--device cpu" in too_small) == (True, False)  # there it would fit, but can't run
    interpret(monkeypatch, True)
    assert planned("micro", *words)["engine"] == "fast"
    monkeypatch.setattr("twinfer.serve.backend.has_triton", lambda: False)
    refused = run("plan", "micro", *words)
    assert (refused.code, "needs Triton" in refused.error_line) == (1, True)


@pytest.mark.parametrize(("content", "said"), [("{}", "model_type is missing"), ('{"model_type": "qwen3"}', "vocab_size, hidden_size, intermediate_size, ")])
def test_a_nearly_empty_config_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    for command in ("plan", "bounds"):
        refused = run(command, str(tmp_path))
        assert (refused.code, f"config.json: {said}" in refused.error_line) == (2, True), refused.error_line


def test_defaults_that_stand_in_for_fields_are_shown(large: Path) -> None:
    said = "config.json does not say, so transformers' defaults count: attention_bias = false"
    assert said in run("plan", str(large)).out
    assert planned(str(large))["assumed"] == ["attention_bias = false"]
    (large / "config.json").write_text(QWEN3_8B.replace("{", '{"attention_bias": false, ', 1))
    assert "does not say" not in run("plan", str(large)).out


def test_the_table() -> None:
    done = run("plan", "micro", "--memory", "4GiB", "--detail")
    assert done.code == 0
    for part in ("weights", "pages", "runtime reserve", "total", "4.0 GiB", "free", "contexts of", "max_batch", "default", "device_page_table", "kv_keys"):
        assert part in done.out, part
    short = run("plan", "micro").out
    assert "no memory was given" in short
    for part in ("\u2503 formula", "num_attention_layers x "):  # a screen for somebody who asks what fits; how it is computed is for --detail
        assert (part in done.out, part in short) == (True, False), part


def test_what_fits_on_another_kind_of_device_is_suggested() -> None:
    refused = run("plan", "micro", "--memory", "1GiB")
    assert refused.code == 2
    assert refused.error_line.endswith("; --device cpu, whose runtime reserve is 0 B, would do")
    assert run("plan", "micro", "--memory", "1GiB", "--device", "cpu").code == 0
    for arguments in (["--memory", "1MiB"], ["--memory", "1MiB", "--device", "cpu"], ["--memory", "2GiB", "--num-pages", "999999"]):
        assert "would do" not in run("plan", "micro", *arguments).error_line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no/such"], 2, ["model = 'no/such'", "config.json", "qwen3 (2 M parameters), micro (0.2 M)"]),
        (["."], 2, ["config.json: no such file"]),
        ([__file__], 2, ["test_plan.py", "JSON"]),
        (["micro", "--memory", "1MiB"], 2, ["1.0 MiB", "too small", "weights"]),
        (["micro", "--memory", "12G"], 2, ["memory = '12G': not a size"]),
        (["micro", "--memory", "2GiB", "--num-pages", "999999"], 2, ["num_pages = 999999", "2.0 GiB"]),
        (["micro", "--device", "tpu"], 2, ["device = 'tpu'", "cuda, cpu"]),
        (["micro", "--dtype", "int4"], 2, ["dtype = 'int4'"]),
        (["micro", "--max-context", "99999999"], 2, ["max_context = 99999999", "max_position_embeddings"]),
        (["micro", "--backend", "fast", "--dtype", "fp64"], 2, ["dtype = 'float64'", "float32, bfloat16, float16", "--backend reference"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("plan", *arguments)
    line = refused.error_line
    assert refused.code == code
    assert all(part in line for part in said), line


def test_a_model_must_be_named() -> None:
    refused = run("plan")
    assert (refused.code, "MODEL" in refused.err) == (2, True)
