"""The fast engine in threads: one at a time in Triton's interpreter, and cuBLAS' memory for a thread comes before its first step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.fast.pair import DEVICE
from tests.fast.test_buffers import GREEDY, opened, run
from twinfer.fast.device import INTERPRETER


@pytest.mark.skipif(DEVICE != "cpu", reason="launches on a GPU do not disturb each other")
def test_no_other_thread_is_in_the_interpreter_while_a_step_is_launched() -> None:
    engine = opened()
    model: Any = engine.executor.model  # type: ignore[attr-defined]
    forward, entered = model.forward, []

    def enter() -> None:
        entered.append(INTERPRETER.acquire(blocking=False))
        if entered[-1]:
            INTERPRETER.release()

    def watched(*args: Any) -> Any:
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        return forward(*args)

    model.forward = watched
    run(engine, ([1, 2], GREEDY))
    assert len(entered) == 3
    assert not any(entered)
    enter()
    assert entered[-1], "between steps it is free"
    engine.close()


def test_a_thread_multiplies_once_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where cuBLAS serves a weight, which none of this model is: its workspace for a thread comes with the thread's first product."""
    engine = opened()
    executor: Any = engine.executor
    monkeypatch.setattr(executor._products, "_equal", {(1, 1): frozenset({1})})
    mm, forward, done = torch.mm, executor.model.forward, []

    def multiplied(*args: Any, **kwargs: Any) -> torch.Tensor:
        done.append(("product", threading.current_thread().name))
        return mm(*args, **kwargs)

    def computed(*args: Any) -> torch.Tensor:
        done.append(("forward", threading.current_thread().name))
        result: torch.Tensor = forward(*args)
        return result

    monkeypatch.setattr(torch, "mm", multiplied)
    executor.model.forward = computed
    for name in ("first", "second"):
        thread = threading.Thread(target=run, args=(engine, ([1], GREEDY)), name=name)
        thread.start()
        thread.join()
    assert done == [(what, name) for name in ("first", "second") for what in ("product", *["forward"] * 3)]
    engine.close()
