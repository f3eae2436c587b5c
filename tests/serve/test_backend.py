"""Which engine and device a command takes. What machine the tests run on is made up here: the answers are the same everywhere."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from tests.serve.command import run
from twinfer.serve import backend
from twinfer.serve.backend import Backend, choose, dtype_name
from twinfer.serve.failure import BadInput, NotAvailable


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with `gpus` GPUs and a build with or without `fast`."""
    import torch

    state = SimpleNamespace(gpus=0, fast=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: state.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state.gpus)
    monkeypatch.setattr(backend, "fast_is_here", lambda: state.fast)
    return state


@pytest.mark.parametrize(
    ("gpus", "fast", "device", "engine", "where", "reason"),
    [
        (0, True, None, "reference", "cpu", "the device is cpu"),
        (2, True, None, "fast", "cuda", "the device is cuda"),
        (2, True, "cuda:1", "fast", "cuda:1", "the device is cuda:1"),
        (2, True, "cpu", "reference", "cpu", "the device is cpu"),
        (2, False, None, "reference", "cuda", "the fast engine is not in this build"),
    ],
)
def test_auto(machine: SimpleNamespace, gpus: int, fast: bool, device: str | None, engine: str, where: str, reason: str) -> None:
    machine.gpus, machine.fast = gpus, fast
    choice = choose(Backend.AUTO, device)
    assert (choice.backend.value, choice.device, choice.reason) == (engine, where, f"auto: {reason}")


def test_named_engines(machine: SimpleNamespace) -> None:
    assert choose(Backend.REFERENCE, None).device == "cpu"
    with pytest.raises(NotAvailable, match="not in this build; use --backend reference"):
        choose(Backend.FAST, None)
    machine.fast = True
    with pytest.raises(BadInput, match="needs a CUDA device, the device is 'cpu'; use --backend reference"):
        choose(Backend.FAST, None)
    machine.gpus = 1
    assert choose(Backend.FAST, None) == backend.Choice(Backend.FAST, "cuda", "")
    with pytest.raises(BadInput, match="device = 'cuda:1': must be one that this machine has: cpu, cuda, cuda:0"):
        choose(Backend.FAST, "cuda:1")


def test_fast_is_here_tells_the_truth() -> None:
    try:
        importlib.import_module("twinfer.fast.engine")
        here = True
    except ImportError:
        here = False
    assert backend.fast_is_here() is here


def test_dtypes() -> None:
    assert [dtype_name(name) for name in (None, "bf16", "float64")] == [None, "bfloat16", "float64"]
    with pytest.raises(BadInput, match="dtype = 'bf17': must be one of float64"):
        dtype_name("bf17")


def test_env_names_what_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    import torch

    monkeypatch.setenv("TWINFER_MAX_BATCH", "4")
    shown = run("env")
    assert shown.code == 0
    for part in ("twinfer", "python", "platform", "torch", torch.__version__.split("+")[0], "engines", "reference", "cpu (", "TWINFER_MAX_BATCH=4"):
        assert part in shown.out
    found = json.loads(run("env", "--json").out)
    assert found["settings"] == ["TWINFER_MAX_BATCH=4"]
