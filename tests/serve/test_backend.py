"""Which engine and device a command takes. What machine the tests run on is made up here: the answers are the same everywhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.serve.command import interpret, run
from twinfer import golden
from twinfer.config import SHORT_DTYPES, ModelConfig, dtype_name
from twinfer.errors import CheckpointError, ConfigError
from twinfer.fast.device import COMPUTED, GDN_HEAD_DIMS
from twinfer.kernels.attention.tiles import HEAD_DIMS
from twinfer.models import BUNDLED
from twinfer.reference.engine import Engine
from twinfer.serve import backend, env
from twinfer.serve.backend import Backend, choose
from twinfer.serve.failure import BadInput, NotAvailable
from twinfer.serve.model import bundled

MICRO = ModelConfig.from_file(bundled("micro").path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with `gpus` GPUs, with or without `triton`, where Triton compiles."""
    import torch

    state = SimpleNamespace(gpus=0, triton=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: state.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state.gpus)
    monkeypatch.setattr(backend, "has_triton", lambda: state.triton)
    interpret(monkeypatch, False)
    return state


@pytest.mark.parametrize(
    ("gpus", "triton", "device", "dtype", "engine", "where", "reason"),
    [
        (0, True, None, "bfloat16", "reference", "cpu", "the device is cpu"),
        (2, True, None, "bfloat16", "fast", "cuda", "the device is cuda"),
        (2, True, "cuda:1", "float16", "fast", "cuda:1", "the device is cuda:1"),
        (2, True, "cpu", "bfloat16", "reference", "cpu", "the device is cpu"),
        (2, True, None, "float64", "reference", "cuda", "dtype = 'float64': the fast engine computes in "),
        (2, False, None, "bfloat16", "reference", "cuda", "backend = 'fast': needs Triton"),
    ],
)
def test_auto(machine: SimpleNamespace, gpus: int, triton: bool, device: str | None, dtype: str, engine: str, where: str, reason: str) -> None:
    machine.gpus, machine.triton = gpus, triton
    choice = choose(Backend.AUTO, device, MICRO, dtype)
    assert (choice.backend.value, choice.device) == (engine, where)
    assert choice.reason.startswith(f"auto: {reason}")


def test_auto_says_why_a_gpu_is_left_idle(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus = 1
    interpret(monkeypatch, True)
    choice = choose(Backend.AUTO, None, MICRO)
    assert (choice.backend, choice.device) == (Backend.REFERENCE, "cuda")
    assert "TRITON_INTERPRET is set" in choice.reason


def test_auto_never_takes_the_interpreter(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, True)
    assert choose(Backend.AUTO, None, MICRO).backend is Backend.REFERENCE


def test_named_engines(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(Backend.REFERENCE, None, MICRO).device == "cpu"
    with pytest.raises(ConfigError, match=r"device = 'cpu': the fast engine needs an NVIDIA GPU; use .*--backend reference"):
        choose(Backend.FAST, None, MICRO)
    machine.gpus = 1
    assert choose(Backend.FAST, None, MICRO) == backend.Choice(Backend.FAST, "cuda", "")
    with pytest.raises(BadInput, match="device = 'cuda:1': must be one that this machine has: cpu, cuda, cuda:0"):
        choose(Backend.FAST, "cuda:1", MICRO)
    with pytest.raises(ConfigError, match="dtype = 'float64'"):
        choose(Backend.FAST, None, MICRO, "float64")
    machine.triton = False
    with pytest.raises(NotAvailable, match=r"needs Triton.*or use --backend reference"):
        choose(Backend.FAST, None, MICRO)
    interpret(monkeypatch, True)
    machine.gpus, machine.triton = 0, True
    assert choose(Backend.FAST, None, MICRO) == backend.Choice(Backend.FAST, "cpu", "")
    with pytest.raises(ConfigError, match=r"dtype = 'bfloat16'.*use --dtype float32"):
        choose(Backend.FAST, None, MICRO, "bfloat16")


def test_a_model_that_the_kernels_lack_goes_to_the_reference(machine: SimpleNamespace) -> None:
    machine.gpus = 1
    odd = dataclasses.replace(MICRO, head_dim=48)
    choice = choose(Backend.AUTO, None, odd)
    assert (choice.backend, choice.reason.startswith("auto: head_dim = 48")) == (Backend.REFERENCE, True)
    with pytest.raises(ConfigError, match="head_dim = 48"):
        choose(Backend.FAST, None, odd)


def test_what_plan_knows_of_the_fast_engine_is_true() -> None:
    assert backend.FAST_DTYPES == COMPUTED
    assert backend.FAST_HEAD_DIMS == HEAD_DIMS
    assert backend.FAST_GDN_HEAD_DIMS == GDN_HEAD_DIMS


def test_the_fast_engine_writes_the_references_text() -> None:
    """Through the whole command, in Triton's interpreter where there is no GPU."""
    line = ("generate", "To be", "--model", "micro", "--temperature", "0", "--max-tokens", "3", "--dtype", "float32")
    fast, reference = run(*line, "--backend", "fast"), run(*line, "--backend", "reference")
    assert (fast.code, fast.out) == (0, reference.out), fast.err
    assert "on the fast engine" in fast.err
    assert ("in Triton's interpreter" in fast.err) is (", cpu, " in fast.err)


@pytest.mark.parametrize("name", [*SHORT_DTYPES, *SHORT_DTYPES.values()])
def test_dtypes_have_the_same_names_in_python_and_on_the_command_line(name: str) -> None:
    full = dtype_name(name)
    with Engine.from_pretrained("micro", dtype=name) as engine:
        assert str(engine.ledger.dtype) == full
    done = run("generate", "x", "--model", "micro", "--max-tokens", "1", "--dtype", name)
    assert (done.code, f", {full}, " in done.err) == (0, True), done.err


def test_a_dtype_that_is_none_is_told_in_the_same_words() -> None:
    with pytest.raises(ConfigError) as refused:
        Engine.from_pretrained("micro", dtype="bf17")
    said = "dtype = 'bf17': must be one of float64, float32, bfloat16, float16 (or fp64, fp32, bf16, fp16)"
    assert str(refused.value) == said
    for command in ("generate x --model", "chat --model", "compare", "check --law2", "plan"):
        assert run(*command.split(), "micro", "--dtype", "bf17", stdin="").error_line == f"error: {said}"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_have_the_same_names_in_python(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Engine.from_pretrained(name, limits={"max_batch": 1}) as engine:
        assert engine.model == ModelConfig.from_file(bundled(name).path)
    shutil.copytree(bundled("micro").path, tmp_path / name, ignore=shutil.ignore_patterns("goldens"))
    (tmp_path / name / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):  # a directory of that name goes before
        Engine.from_pretrained(name)
    assert "neither model.safetensors" in run("generate", "x", "--model", name).error_line


def test_golden_is_where_the_names_lead() -> None:
    assert {name: bundled(name).path for name in BUNDLED} == {"qwen3": golden.BUNDLED, "micro": golden.MICRO}


def test_a_model_that_is_none_is_told_in_the_same_words() -> None:
    with pytest.raises(ConfigError) as refused:
        Engine.from_pretrained("no/such")
    assert "or a bundled model: qwen3 (2 M parameters), micro (0.2 M)" in str(refused.value)
    for command in ("generate x --model", "chat --model", "compare", "check --law2", "plan", "generate x --random-weights 1 --model"):
        assert run(*command.split(), "no/such").error_line == f"error: {refused.value}"


def test_env_names_what_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TWINFER_MAX_BATCH", "4")
    shown = run("env")
    assert shown.code == 0
    for part in ("twinfer", "python", "platform", "torch", torch.__version__.split("+")[0], "fast engine", "cpu (", "TWINFER_MAX_BATCH=4"):
        assert part in shown.out
    found = json.loads(run("env", "--json").out)
    assert found["settings"] == ["TWINFER_MAX_BATCH=4"]


def test_env_says_whether_the_fast_engine_can_run(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "has_triton", lambda: machine.triton)
    monkeypatch.setattr(env, "_devices", list)

    def said() -> str:
        shown: str = json.loads(run("env", "--json").out)["fast engine"]
        return shown

    assert said().startswith("can't run: device = 'cpu': the fast engine needs an NVIDIA GPU")
    machine.gpus = 1
    assert said() == "can run on cuda"
    interpret(monkeypatch, True)
    assert said().startswith("can run on cpu, in Triton's interpreter")
    machine.triton = False
    assert said().startswith("can't run: backend = 'fast': needs Triton")
