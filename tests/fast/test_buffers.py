"""What the fast executor holds and writes: nothing outside its ledger, padding only on the padding page, no staging set while its step is in flight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import twinfer.fast
from tests.fast.pair import DEVICE, SMALL
from twinfer.engine.engine import Engine
from twinfer.golden import MICRO
from twinfer.invariants.ledger import Ledger
from twinfer.plan import StepPlan
from twinfer.sampling import SamplingParams

TEXT = list(b"Once more unto the breach, dear friends, once more; or close the wall up with our English dead")
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
EVERY_KIND = (
    (TEXT[:7], replace(GREEDY, logprobs=2, prompt_logprobs=1)),
    (TEXT[20:24], replace(GREEDY, temperature=1.0, seed=1, top_k=9, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0})),
    (TEXT[30:33], GREEDY),
)
Range = tuple[int, int]


def opened(**limits: int) -> Engine:
    return twinfer.fast.Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, limits={**SMALL, **limits}, audit="full", graphs=True)


def run(engine: Engine, *asks: tuple[list[int], SamplingParams]) -> None:
    for prompt, params in asks:
        engine.add(prompt, params)
    while engine.has_work:
        assert not any(event.error for event in engine.step())


def memory(held: Any) -> Range:
    """First and last address of the bytes that a tensor or an array shows."""
    if isinstance(held, torch.Tensor):
        last = sum((n - 1) * stride for n, stride in zip(held.shape, held.stride(), strict=True)) + 1 if held.numel() else 0
        return held.data_ptr(), held.data_ptr() + last * held.element_size()
    low, high = np.lib.array_utils.byte_bounds(held)
    return int(low), int(high)


def block(held: Any) -> Range:
    """First and last address of the whole allocation that a tensor or an array is a part of."""
    while isinstance(held, np.ndarray) and held.base is not None:
        held = held.base
    if isinstance(held, torch.Tensor):
        storage = held.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return memory(held)


def held_by(root: object) -> Iterator[tuple[str, Any]]:
    """Every tensor and array that is reached from `root` by attributes, entries and elements, with the way to it."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("executor", root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, type)):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, np.ndarray)):
            yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}[{key!r}]", each) for key, each in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
            waiting += [(f"{path}[{i}]", each) for i, each in enumerate(value)]
        elif type(value).__module__.startswith("twinfer."):
            names = {*getattr(value, "__dict__", {})} | ({f.name for f in fields(value)} if is_dataclass(value) else set())
            waiting += [(f"{path}.{name}", getattr(value, name)) for name in names]


def outside(ranges: list[Range], held: Iterator[tuple[str, Any]]) -> list[str]:
    """What shows a byte that no range covers."""
    found = []
    for path, value in held:
        low, high = memory(value)
        if not any(first <= low and high <= last for first, last in ranges):
            found.append(f"{path} {tuple(value.shape)} {value.dtype}")
    return found


def test_every_tensor_that_outlives_a_step_is_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's own record: what `allocate` gave. Beside it a model has its weights, and nothing is left on the heap after a step."""
    ranges: list[Range] = []
    allocate = Ledger.allocate

    def recorded(self: Ledger, name: str, make: Any, **kwargs: Any) -> Any:
        buffer = allocate(self, name, make, **kwargs)
        ranges.append(block(buffer))
        return buffer

    monkeypatch.setattr(Ledger, "allocate", recorded)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
    engine = opened(look_ahead=1)
    weights = [memory(value) for _, value in held_by(engine.executor.model.weights)]  # type: ignore[attr-defined]
    run(engine, *EVERY_KIND)
    assert len(ranges) > 80
    assert len(weights) == 2 * 8 + 3
    assert outside(ranges + weights, held_by(engine.executor)) == []
    gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and id(thing) not in before]
    assert len(alive) > 80
    assert outside(ranges + weights, ((f"tensor {i}", thing) for i, thing in enumerate(alive))) == []

    engine.executor._inputs.kept = torch.zeros(8)  # type: ignore[attr-defined]
    (stray,) = outside(ranges + weights, held_by(engine.executor))
    assert stray.endswith(".kept (8,) torch.float32")
    engine.close()


def test_a_step_writes_its_own_slots_and_the_padding_page_alone() -> None:
    """Keys and values before and after each step, bit by bit, on pages that hold NaN where nobody has written."""
    engine = opened(look_ahead=1)
    executor: Any = engine.executor
    launch = executor.launch
    size = engine.limits.page_size
    padded = []

    def watched(plan: StepPlan) -> None:
        caches = [executor.buffers()[name] for name in ("kv_keys", "kv_values")]
        before = [cache.clone() for cache in caches]
        launch(plan)
        flat = executor._flying[-1].staged.flat
        own = set(flat.write_slots.tolist())
        assert min(own) >= size, "the plan's own tokens do not go to the padding page"
        for cache, old in zip(caches, before, strict=True):
            differs = (cache.contiguous().view(torch.int32) != old.contiguous().view(torch.int32)).any(-1).any(-1)  # [layers, pages, page_size]
            for layer in differs:
                written = set(layer.flatten().nonzero().flatten().tolist())
                assert written - set(range(size)) == own, f"step {plan.step} writes {sorted(written - own)} beside its own slots"
        if executor._flying[-1].staged.shape.num_tokens > plan.num_tokens:
            padded.append(plan.step)

    executor.launch = watched
    run(engine, *EVERY_KIND)
    assert len(padded) >= 2
    keys = executor.buffers()["kv_keys"][:, 0]  # [layers, page_size, heads, dim]
    assert keys[:, 0].isfinite().all(), "padding writes the padding page"
    assert keys[:, 1:].isnan().all(), "and only its first slot"
    engine.close()


def test_a_staging_set_stays_as_it_is_while_its_step_is_in_flight() -> None:
    """Two steps ahead need three sets."""
    engine = opened(look_ahead=2)
    executor: Any = engine.executor
    buffers = executor._buffers
    launch, collect, flying, rewritten, most = executor.launch, executor.collect, [], [], []

    def watched_launch(plan: StepPlan) -> None:
        launch(plan)
        staging = buffers.staging[executor._flying[-1].staged.set]
        flying.append((plan.step, staging, {name: array.copy() for name, array in staging.items()}))
        most.append(len(flying))

    def watched_collect() -> Any:
        step, staging, copies = flying.pop(0)
        rewritten.extend(step for name, copy in copies.items() if staging[name].tobytes() != copy.tobytes())
        return collect()

    executor.launch, executor.collect = watched_launch, watched_collect
    for prompt, params in ((TEXT[:5], replace(GREEDY, max_tokens=5)), (TEXT[9:12], GREEDY)):
        engine.add(prompt, params)
    while engine.has_work:
        engine.step()
    assert max(most) == 3, "steps were in flight together"
    assert rewritten == []
    engine.close()
