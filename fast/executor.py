"""FastExecutor: computes StepPlans with Triton kernels. It holds tensors, streams and graphs; it decides nothing that shows in a bit.

One step: stage on the host -> one copy to the device -> forward (a captured graph up to 2048 tokens, else launch by launch) -> sampling ->
copy of tokens back. `launch` returns when all of that is queued; `collect` waits for the oldest step. Everything runs on one stream, in order, so a
step finds the pages, the page table and the fed-back tokens that the steps before it left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.engine.flatten import FlatTokens
from twinfer.errors import ExecutorLost, StepFailed
from twinfer.fast.buffers import Buffers
from twinfer.fast.device import Device, check_limits
from twinfer.fast.graphs import Graphs
from twinfer.fast.inputs import StagedStep, StepInputs
from twinfer.fast.model import Model
from twinfer.fast.sampling import Sampling
from twinfer.fast.shape import Shapes, exact
from twinfer.fast.weights import Joined, fused
from twinfer.invariants.ledger import Ledger
from twinfer.kernels.matmul.cublas import Products
from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import StepPlan

Tap = Callable[[StepPlan, FlatTokens, int, torch.Tensor], None]
TapSampled = Callable[[StepPlan, FlatTokens, NDArray[np.int32], torch.Tensor], None]


@dataclass(slots=True)
class _Flying:
    """A launched step: its plan, and what it left in the staging set, or what went wrong before it was queued."""

    plan: StepPlan
    staged: StagedStep | None
    done: torch.cuda.Event | None
    error: Exception | None = None


class FastExecutor:
    """An Executor. `weights` by checkpoint name, all of one dtype on one device; `joined` holds those that are parts of joined matrices (None: copied).

    graphs  None: where there is a GPU

    For gates and comparisons, None costs nothing:
    tap          called with each step's plan, its tokens, and the logits of all of them in tiles: the first token of a tile and [n, V]
    tap_sampled  called with plan, tokens, the indices [n] of those that samples follow, and the very logits [n, V] that they were drawn from, whenever
                 all of the step's samples fit one tile
    Both are shown a buffer that the next tile reuses.
    """

    name = "fast"

    def __init__(
        self, config: ModelConfig, limits: Limits, weights: Mapping[str, torch.Tensor], ledger: Ledger, *, joined: Joined | None = None,
        graphs: bool | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.config = limits, config
        check_limits(limits)
        some = next(iter(weights.values()))
        self.device = Device.of(some.device, some.dtype)
        self._shapes = Shapes(limits)
        joined = Joined(config, some.dtype, some.device) if joined is None else joined
        joined.fill(weights)
        held = fused(config, weights, joined)
        multiplied = held.multiplied()
        self.device.synchronize()  # what was made so far was queued on another stream than steps are
        with self.device.stream():  # before the cache takes the memory that the comparison needs for a moment
            self._products = Products.checked(multiplied, self._shapes.products())
        if self.device.compiled:
            torch.cuda.empty_cache()
        self._buffers = Buffers(config, ledger, some.device, limits.look_ahead + 1)
        self._inputs = StepInputs(config, limits, self._buffers, self.device)
        self.model = Model(config, held, self._buffers, self._products)
        self._sampling = Sampling(limits, config.vocab_size, self._buffers, self.model)
        wanted = self.device.compiled if graphs is None else graphs
        self._graphs = Graphs(self._shapes, self._inputs, self.model, self._sampling, self.device) if wanted else None
        self._flying: deque[_Flying] = deque()
        # Whether a forward that is launched kernel by kernel fails where memory is taken. The allocator's counters are the process's, so that another
        # thread's memory would count too: for full audits.
        self.watch_allocations = False
        self.tap: Tap | None = None
        self.tap_sampled: TapSampled | None = None
        self.device.synchronize()
        if self._graphs is not None:
            with self.device.stream():
                self._graphs.capture()

    def launch(self, plan: StepPlan) -> None:
        """Queues one step. A failure before it is queued is kept for `collect`; a device error is loss."""
        try:
            with torch.inference_mode(), self.device.stream():
                self._flying.append(self._queue(plan))
        except Exception as error:
            self._flying.append(self._failed(plan, error))

    def _failed(self, plan: StepPlan, error: Exception) -> _Flying:
        """What was queued of the step before it failed still runs: `collect` waits for it, and by that learns whether the device lives."""
        told = error if isinstance(error, ExecutorLost) else StepFailed(f"step {plan.step}: {type(error).__name__}: {error}")
        if isinstance(error, torch.AcceleratorError):
            told = ExecutorLost(str(told))
        try:
            done = self.device.record()
        except Exception as second:
            done, told = None, ExecutorLost(f"{told}; then {type(second).__name__}: {second}")
        return _Flying(plan, None, done, told)

    def collect(self) -> StepOutput:
        flying = self._flying.popleft()
        try:
            if flying.done is not None:
                flying.done.synchronize()
        except Exception as error:
            raise ExecutorLost(f"step {flying.plan.step}: {error}{f' (after: {flying.error})' if flying.error else ''}") from error
        if flying.error is not None:
            raise flying.error
        assert flying.staged is not None, "a step without an error was staged"
        return self._sampling.output(flying.plan, flying.staged)

    def buffers(self) -> Mapping[str, Any]:
        return self._buffers.all()

    def close(self) -> None:
        """Lets go of weights, graphs and cache at once, whoever still holds the engine; the engine above has ended every request."""
        self._flying.clear()
        with suppress(Exception):  # a device that is lost can't be waited for
            self.device.synchronize()
        self.tap = self.tap_sampled = None
        if self._graphs is not None:
            self._graphs.clear()
        self._graphs = None
        self.model.clear()
        self._buffers.clear()
        if self.device.compiled:
            with suppress(Exception):  # nor give anything back
                torch.cuda.empty_cache()

    def _queue(self, plan: StepPlan) -> _Flying:
        shape = exact(plan) if self._graphs is None else self._shapes.of(plan)
        staged = self._inputs.stage(plan, shape)
        self._products.enter_thread()  # what the forward takes from the allocator would fail the step
        if plan.restores.size and self.model.states is not None:
            self.model.states.restore(plan.restores.tolist())
        hidden: torch.Tensor | None
        if shape.captured and self._graphs is not None:
            hidden = self._graphs.replay(staged)
        else:
            what = f"the forward of {shape.num_tokens} tokens"
            with self.device.allocating_nothing(what) if self.watch_allocations else nullcontext():
                hidden = self.model.forward(shape.num_tokens, staged.launches)
        if hidden is not None:
            self._sampling.run(hidden, staged, plan)
        if plan.saves.size and self.model.states is not None:
            self.model.states.save(plan.saves.tolist())
        self._sampling.report(staged)
        if self.tap_sampled is not None and 0 < staged.num_sampled <= staged.num_drawn <= self.limits.max_logit_tokens and not len(plan.targets):
            at = self._buffers.staging[staged.set]["sampled_at"][: staged.num_sampled].copy()
            self.tap_sampled(plan, staged.flat, at, self._buffers.tensors["logits"][: staged.num_sampled])
        if self.tap is not None:
            self._show_logits(plan, staged.flat, self.tap)
        return _Flying(plan, staged, self.device.record())

    def _show_logits(self, plan: StepPlan, flat: FlatTokens, tap: Tap) -> None:
        """Logits of every token of the step, from what the last norm left in its buffer."""
        hidden, size = self._buffers.tensors["normed"], self.limits.max_logit_tokens
        for first in range(0, flat.num_tokens, size):
            tap(plan, flat, first, self.model.logits(hidden[first : min(first + size, flat.num_tokens)]))
