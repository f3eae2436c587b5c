"""Two fast engines in one process, each in its own thread: Triton's interpreter has one grid for all threads, so that one at a time may be in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

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
