"""Graphs: the forward and the sampling of steps in which every row has one token, captured once for each bucket and replayed. It stages nothing.

A graph reads its inputs, the attention tasks and their number from the executor's buffers, so that one graph serves every step of up to its bucket's
rows. Padding rows have no attention task, write to the padding page and draw no token.
"""

from __future__ import annotations

import torch

from twinfer.fast.inputs import StagedStep, StepInputs
from twinfer.fast.model import AttentionLaunch, Model
from twinfer.fast.sampling import Sampling
from twinfer.kernels.sampling.sampler import Columns, Stages
from twinfer.limits import Limits

GREEDY = Stages(adjust=False, draw=False, top_k=False, top_p=False)
DRAW = Stages(adjust=False, draw=True, top_k=False, top_p=False)


class Graphs:
    """One graph a bucket and kind of sampling: greedy, or drawn without filters. Steps that want more sample behind a graph of the forward alone."""

    def __init__(self, limits: Limits, inputs: StepInputs, model: Model, sampling: Sampling, compiled: bool) -> None:
        """compiled False: where there is no GPU, "replaying" runs the same padded step launch by launch, for tests of what padding touches."""
        self._limits, self._inputs, self._model, self._sampling, self._compiled = limits, inputs, model, sampling, compiled
        self._graphs: dict[tuple[int, Stages | None], torch.cuda.CUDAGraph] = {}
        self._hidden: dict[int, torch.Tensor] = {}

    def capture(self) -> None:
        """Captures all of them, largest first, so that a later one finds the memory of an earlier one. Each has run once before, to be compiled."""
        if not self._compiled:
            return
        columns = self._inputs.columns()
        for bucket in reversed(self._limits.buckets):
            launches = (self._inputs.decode_launch(bucket),)
            for stages in (None, GREEDY, DRAW):
                self._step(bucket, launches, columns, stages)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    self._step(bucket, launches, columns, stages)
                self._graphs[bucket, stages] = graph

    def replay(self, bucket: int, staged: StagedStep, *, plain: bool) -> torch.Tensor | None:
        """Runs the step's graph. Gives hidden vectors that are still to be sampled, or None where the graph has sampled too (`plain`: tokens only)."""
        kind = staged.stages if plain and staged.stages in (GREEDY, DRAW) else None
        if self._compiled:
            self._graphs[bucket, kind].replay()
        else:
            self._step(bucket, staged.launches, staged.columns, kind)
        return self._hidden[bucket] if kind is None else None

    def _step(self, bucket: int, launches: tuple[AttentionLaunch, ...], columns: Columns, stages: Stages | None) -> None:
        self._hidden[bucket] = self._model.forward(bucket, launches)
        if stages is not None:
            self._sampling.draw(self._hidden[bucket], bucket, columns, stages, -1, in_order=True)
