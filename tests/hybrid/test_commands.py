"""The commands on the later types: generate, compare and check from a tiny hybrid directory, and from shapes alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.command import run
from twinfer.golden.hybrid import write
from twinfer.reference import Engine
from twinfer.sampling import SamplingParams

from .engines import write_config
from .shapes import NEW

TEXT = "To be, or not to be"


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"))


def test_generate_writes_what_the_engine_writes(micro: Path) -> None:
    done = run("generate", TEXT, "--model", str(micro), "--temperature", "0", "--max-tokens", "6", "--json")
    assert done.code == 0, done.err
    (record,) = map(json.loads, done.out.splitlines())
    with Engine.from_pretrained(micro, limits={"max_batch": 2, "max_chunk_tokens": 4}) as engine:
        (result,) = engine.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=6))
    assert result.num_cached_tokens == 0
    assert record["text"] == result.completions[0].text


def test_head_dims_without_kernels_are_refused_in_one_line(tmp_path: Path) -> None:
    config = json.loads((write(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "linear_value_head_dim": 24}))
    refused = run("plan", str(tmp_path), "--backend", "fast")
    assert refused.code == 2
    assert "linear_value_head_dim = 24: the fast engine" in refused.error_line
    assert "--backend reference" in refused.error_line
    assert run("plan", str(tmp_path), "--device", "cuda").code == 0, "auto takes the reference"


@pytest.mark.parametrize(("dtype", "most"), [("fp64", 1e-9), ("fp32", 1e-3)])
def test_compare_agrees_with_transformers(micro: Path, dtype: str, most: float) -> None:
    done = run("compare", str(micro), "--dtype", dtype, "--prompt", TEXT, "--max-tokens", "4", "--json", "--quiet")
    assert done.code == 0, done.err
    (record,) = map(json.loads, done.out.splitlines())
    assert (record["side"], record["passed"], record["num_tokens"]) == ("transformers", True, 4)
    assert 0 < record["logprob"] <= most


@pytest.mark.parametrize("name", NEW)
def test_compare_with_made_up_weights(name: str, tmp_path: Path) -> None:
    """They reach transformers through a checkpoint in the published layout."""
    path = write_config(tmp_path, name)
    done = run("compare", str(path), "--dtype", "fp64", "--random-weights", "1", "--max-tokens", "3", "--json", "--quiet")
    assert done.code == 0, done.err
    records = [json.loads(line) for line in done.out.splitlines()]
    assert records
    assert all(record["passed"] and record["logprob"] <= 1e-9 for record in records)
