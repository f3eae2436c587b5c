"""Graphs: steps captured once for each shape and replayed: the forward, and where every row decodes the sampling too. It stages nothing.

A graph reads its inputs, the attention tasks and their number from the executor's buffers, so that one graph serves every step of up to its shape's
tokens. Padding tokens have no attention task, write to the padding page and draw no token.
"""

from __future__ import annotations

import torch

from twinfer.fast.device import Device
from twinfer.fast.inputs import StagedStep, StepInputs
from twinfer.fast.launches import Launches
from twinfer.fast.model import Model
from twinfer.fast.sampling import Sampling
from twinfer.fast.shape import Shapes, StepShape
from twinfer.kernels.sampling.sampler import Columns, Stages

GREEDY = Stages(adjust=False, draw=False, top_k=False, top_p=False)
DRAW = Stages(adjust=False, draw=True, top_k=False, top_p=False)


class Graphs:
    """A graph a shape; for decoding one with each kind of sampling too: greedy, or drawn without filters. Whatever else is wanted is sampled behind one."""

    def __init__(self, shapes: Shapes, inputs: StepInputs, model: Model, sampling: Sampling, device: Device) -> None:
        """Where there is no GPU, "replaying" runs the same padded step launch by launch, for tests of what padding touches."""
        self._shapes, self._inputs, self._model, self._sampling, self._device = shapes, inputs, model, sampling, device
        self._graphs: dict[tuple[StepShape, Stages | None], torch.cuda.CUDAGraph] = {}
        self._hidden: dict[StepShape, torch.Tensor] = {}

    def capture(self) -> None:
        """Captures all of them. Each runs once before, so that its kernels are compiled and loaded."""
        if not self._device.compiled:
            return
        columns = self._inputs.columns()
        for shape in self._shapes.all():
            launches = self._inputs.graph_launches(shape)
            for stages in (None, GREEDY, DRAW) if shape.decode else (None,):
                self._step(shape, launches, columns, stages)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                what = f"the capture of {shape.num_tokens} tokens"
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()), self._device.allocating_nothing(what):
                    self._step(shape, launches, columns, stages)
                self._graphs[shape, stages] = graph

    def clear(self) -> None:
        """Forgets every graph."""
        self._graphs.clear()
        self._hidden.clear()

    def replay(self, staged: StagedStep) -> torch.Tensor | None:
        """Runs the step's graph. Gives hidden vectors that are still to be sampled, or None where the graph has sampled too (tokens only)."""
        shape = staged.shape
        kind = staged.stages if not staged.asked and shape.decode and staged.stages in (GREEDY, DRAW) else None
        if self._device.compiled:
            self._graphs[shape, kind].replay()
        else:
            self._step(shape, self._inputs.graph_launches(shape), staged.columns, kind)
        return self._hidden[shape] if kind is None else None

    def _step(self, shape: StepShape, launches: Launches, columns: Columns, stages: Stages | None) -> None:
        hidden = self._hidden[shape] = self._model.forward(shape.num_tokens, launches)
        if stages is not None:
            self._sampling.draw(hidden, shape.num_tokens, columns, stages, -1, in_order=True)
