"""A device error on the reference is the executor's loss, not a failed step: such an error stays, so health must turn false."""

from __future__ import annotations

import torch

from twinfer.request import FinishReason
from twinfer.sampling import SamplingParams

from .recorder import open_engine


def test_a_device_error_makes_the_engine_unhealthy() -> None:
    engine = open_engine("micro", "float32")
    request = engine.add([65, 66], SamplingParams(max_tokens=4))

    def broken(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    engine.executor.model.forward = broken  # type: ignore[attr-defined]
    assert [(e.request_id, e.finish_reason, e.terminal) for e in engine.step()] == [(request, FinishReason.ERROR, True)]
    assert not engine.healthy
