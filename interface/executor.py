"""The Executor protocol: what an engine asks of the thing that computes. Executors decide nothing; they compute what a plan says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import StepPlan


@runtime_checkable
class Executor(Protocol):
    """Computes plans in the order in which they are launched.

    An executor keeps a replica of the page table, starting empty at version 0. A failure of one step with the device alive is StepFailed; the
    next plan may follow. A dead device or worker is ExecutorLost. A failed or abandoned step leaves no trace that a later plan can see:
    whatever it wrote lies in pages that the engine frees unsealed.
    """

    name: str
    limits: Limits

    def launch(self, plan: StepPlan) -> None:
        """Starts one step. At most `limits.look_ahead + 1` launched steps may be uncollected."""
        ...

    def collect(self) -> StepOutput:
        """Waits for the oldest launched step and gives its output. Raises StepFailed or ExecutorLost."""
        ...

    def buffers(self) -> Mapping[str, Any]:
        """Every buffer that outlives a step, by the name of its bound: for memory reports, poison and guard zones."""
        ...

    def close(self) -> None:
        """Frees everything. Calling it again does nothing."""
        ...
