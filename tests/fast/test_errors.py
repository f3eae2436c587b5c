"""Where the fast engine can't run: one clear error that names the remedy, before any weight is read. Not what goes wrong in a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import twinfer.fast
import twinfer.reference
from tests.fast.pair import DEVICE
from twinfer.engine import pretrained
from twinfer.engine.checkpoint import Checkpoint
from twinfer.errors import ConfigError
from twinfer.golden import MICRO

OPEN = f"""
from pathlib import Path
from twinfer.engine.checkpoint import Checkpoint
def refuse(*args, **kwargs):
    raise AssertionError("weights were read")
Checkpoint.weights = refuse
import twinfer.fast
try:
    twinfer.fast.Engine.from_pretrained(Path({str(MICRO)!r}), device="cpu", dtype="float32")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads or makes a weight in these tests."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", refuse)
    monkeypatch.setattr(pretrained, "random_weights", refuse)


def in_a_process(code: str) -> str:
    """Standard output of `code` in a Python that was not told to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_a_cpu_without_the_interpreter() -> None:
    told = in_a_process(OPEN)
    assert told.startswith("ConfigError device = 'cpu'")
    assert "TRITON_INTERPRET=1" in told
    assert "--backend reference" in told


def test_no_triton() -> None:
    """The import is blocked, as on a system that Triton has no wheel for."""
    told = in_a_process("import sys\nsys.modules['triton'] = None\n" + OPEN)
    assert told.startswith("ImportError the fast engine needs Triton")
    assert "pip install" in told
    assert "twinfer.reference.Engine" in told


@pytest.mark.skipif(DEVICE != "cpu", reason="bfloat16 is what a GPU computes in")
def test_bfloat16_in_the_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"dtype = 'bfloat16'.*--dtype float32"):
        twinfer.fast.Engine.from_pretrained(MICRO, dtype="bfloat16", device=DEVICE)


def test_float64() -> None:
    with pytest.raises(ConfigError, match=r"dtype = 'float64'.*float32.*the reference engine has float64"):
        twinfer.fast.Engine.from_pretrained(MICRO, dtype="float64", device=DEVICE)


def test_a_head_dim_that_kernels_have_no_tile_for(tmp_path: Path) -> None:
    config = json.loads((MICRO / "config.json").read_text()) | {"head_dim": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"head_dim.*96") as caught:
        twinfer.fast.Engine.from_pretrained(tmp_path, dtype="float32", device=DEVICE, random_seed=1)
    assert "reference" in str(caught.value)


@pytest.mark.parametrize("module", [twinfer.fast, twinfer.reference])
def test_an_audit_level_that_nobody_knows(module: Any) -> None:
    with pytest.raises(ValueError, match="audit level 'all': must be one of step, full"):
        module.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, audit="all")
