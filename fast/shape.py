"""StepShape: how many tokens a step computes, padding included, and whether a graph serves it. Sizes only; what is in the step is inputs.py's."""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.limits import Limits, ceil_div
from twinfer.plan import StepPlan

# Tokens that mixed steps are padded to; a step of more is launched kernel by kernel, since its kernels outlast their launches. Launching costs about
# 15 ms of the host for Qwen3-8B (time to the first token of a prompt of 128, H200), a graph of 2048 tokens takes the GPU 45 ms.
TOKEN_BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
EAGER = 128  # larger steps are padded to multiples of it: sizes at which cuBLAS was compared


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_tokens to compute. decode: they are rows of one token that all sample, so that sampling can be in the graph. captured: a graph serves it."""

    num_tokens: int
    decode: bool
    captured: bool


class Shapes:
    """The shapes that graphs are captured for, under `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets = [size for size in TOKEN_BUCKETS if size < limits.max_step_tokens]
        if limits.max_step_tokens <= TOKEN_BUCKETS[-1]:
            self._buckets.append(limits.max_step_tokens)

    def all(self) -> tuple[StepShape, ...]:
        """Largest first. A bucket that no batch can need is left out: no buffer is as large."""
        most = self._limits.bucket(self._limits.max_batch)
        rows = [StepShape(size, True, True) for size in self._limits.buckets if size <= most]
        tokens = [StepShape(size, False, True) for size in self._buckets]
        return tuple(sorted(rows + tokens, key=lambda shape: -shape.num_tokens))

    def products(self) -> tuple[int, ...]:
        """Numbers of tokens that a product of a step may have, but for positions that are gathered for their logits: of those, what one tile may hold."""
        limits = self._limits
        sizes = {shape.num_tokens for shape in self.all()} | {min(size, limits.max_step_tokens) for size in range(EAGER, limits.max_step_tokens + EAGER, EAGER)}
        return tuple(sorted(sizes | set(range(1, limits.max_logit_tokens + 1))))

    def of(self, plan: StepPlan) -> StepShape:
        """The smallest captured shape that a plan fits into, or its own."""
        if plan.num_tokens == plan.num_rows and bool((plan.num_samples == 1).all()):
            return StepShape(self._limits.bucket(plan.num_rows), True, True)
        size = next((size for size in self._buckets if size >= plan.num_tokens), None)
        if size is None:
            size = min(ceil_div(plan.num_tokens, EAGER) * EAGER, self._limits.max_step_tokens)
            return StepShape(size, False, False)
        return StepShape(size, False, True)


def exact(plan: StepPlan) -> StepShape:
    """The plan's own number of tokens, launched kernel by kernel."""
    return StepShape(plan.num_tokens, False, False)
