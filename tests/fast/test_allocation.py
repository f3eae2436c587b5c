"""No forward and no sampling of the fast engine takes memory: every tensor that an operation gives back is a part of one that was there. Sizes: test_bounds.

On a GPU the executor itself watches the caching allocator, at every capture and every step that is launched kernel by kernel; here torch's own
operations are watched, which the interpreter's launches are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import twinfer.fast
from tests.fast.pair import DEVICE, SMALL
from tests.fast.test_buffers import EVERY_KIND, GREEDY, TEXT, memory, opened, run
from twinfer.engine.engine import Engine
from twinfer.errors import AllocationError
from twinfer.fast.device import Device
from twinfer.fast.model import Model
from twinfer.fast.sampling import Sampling
from twinfer.golden import MICRO


class Watch(TorchDispatchMode):
    """Notes every operation that gives a tensor whose bytes none of its arguments had."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        storages = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        self.num_seen += 1
        self.found += [str(func) for t in tensors_in(given) if t.numel() and t.untyped_storage().data_ptr() not in storages]
        return given


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, *inside: tuple[type, str]) -> Iterator[Watch]:
    """A Watch over what methods do, and over nothing else."""
    watch = Watch()
    for owner, name in inside:
        method = getattr(owner, name)

        def under(self: Any, *args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
            with watch:
                return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, under)
    yield watch


FORWARD = ((Model, "forward"), (Sampling, "draw"), (Sampling, "_score"), (Sampling, "report"))


def test_forward_and_sampling_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(look_ahead=1)
    with watched(monkeypatch, *FORWARD) as watch:
        run(engine, *EVERY_KIND)
    assert watch.num_seen > 300
    assert watch.found == []
    engine.close()


def test_a_forward_that_takes_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, *args: forward(self, *args).clone())
    engine = opened()
    with watched(monkeypatch, *FORWARD) as watch:
        run(engine, (TEXT[:3], GREEDY))
    assert set(watch.found) == {"aten.clone.default"}
    engine.close()


def test_memory_taken_on_a_gpu_fails_the_step_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of torch's allocator, played by hand."""
    counts = iter([(5, 700), (7, 1724), (7, 1724), (7, 1724)])
    names = ("allocation.all.allocated", "allocated_bytes.all.allocated")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(zip(names, next(counts), strict=True)))
    device = Device("cuda", True, (9, 0), 132, "bfloat16", FakeStream())  # type: ignore[arg-type]
    with pytest.raises(AllocationError, match="the forward of 3 tokens took 1024 bytes in 2 blocks"), device.allocating_nothing("the forward of 3 tokens"):
        pass
    with device.allocating_nothing("the forward of 3 tokens"):
        pass


@pytest.mark.parametrize(("audit", "watched_steps"), [("full", 1), ("step", 0)])
def test_a_full_audit_watches_forwards_that_are_launched(audit: str, watched_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters are the process's: in production another thread's memory would fail a step."""
    seen: list[str] = []

    @contextmanager
    def noted(self: Device, what: str) -> Iterator[None]:
        seen.append(what)
        yield

    monkeypatch.setattr(Device, "allocating_nothing", noted)
    engine = twinfer.fast.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits=SMALL, audit=audit, graphs=False)
    run(engine, (TEXT[:2], replace(GREEDY, max_tokens=1)))
    assert seen == ["the forward of 2 tokens"] * watched_steps
    engine.close()


class FakeStream:
    device = torch.device("cuda")


def test_parts_of_joined_matrices_lie_in_them() -> None:
    """The engine loads into them, so that no weight exists twice."""
    engine: Engine = opened()
    weights: Any = engine.executor.model.weights  # type: ignore[attr-defined]
    for layer in weights.layers:
        for matrix in (layer.mixer.qkv, layer.feed_forward.gate_up):
            low, high = memory(matrix)
            assert high - low == matrix.untyped_storage().nbytes()
    engine.close()
