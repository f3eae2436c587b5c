"""What `sample` and `logprobs` launch: grids and kernels depend on shapes and stages alone, and the compile jobs are exactly what is launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.test_sampling import mixed_columns, on_device
from twinfer.kernels.sampling import kernel
from twinfer.kernels.sampling.operation import compile_jobs
from twinfer.kernels.sampling.sampler import Scratch, Stages, logprobs, sample, scratch_shapes
from twinfer.kernels.sampling.tiles import DEFAULT

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SIZE = 151936
Launch = tuple[str, tuple[int, ...], dict[str, str], dict[str, Any]]


@dataclass
class Recorder:
    """Stands for a kernel: keeps name, grid, argument types and constants of each launch, and computes nothing."""

    name: str
    arg_names: list[str]
    launches: list[Launch] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            bound = dict(zip(self.arg_names, args, strict=False))
            types = {name: POINTERS[value.dtype] if isinstance(value, Tensor) else "i32" for name, value in bound.items()}
            assert not any(isinstance(value, float) for value in bound.values())
            assert set(types) | set(constants) == set(self.arg_names)
            self.launches.append((self.name, grid, types, {**constants, "num_warps": num_warps}))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    for name in [n for n in dir(kernel) if n.endswith("_kernel")]:
        monkeypatch.setattr(kernel, name, Recorder(name, getattr(kernel, name).arg_names, found))
    return found


def call(stages: Stages, dtype: torch.dtype, masked: bool, fed: bool, seed: int = 1) -> None:
    """Two positions of a real vocabulary; the content is drawn from `seed`."""
    rows = torch.tensor([0, 1], dtype=torch.int32)
    mask = np.zeros((2, -(-SIZE // 32)), np.uint32) if masked else None
    feeds = (rows.clone(), torch.zeros(2, dtype=torch.int32)) if fed else (None, None)
    sample(
        torch.full((2, SIZE), float(seed), dtype=dtype), rows, rows, on_device(mixed_columns(2, SIZE, seed), mask),
        torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), Scratch.empty(2, SIZE), stages, *feeds,
    )  # fmt: skip


def test_grids_and_kernels_depend_on_shapes_and_stages_alone(launches: list[Launch]) -> None:
    call(Stages(), torch.bfloat16, True, True, seed=1)
    first = launches.copy()
    launches.clear()
    call(Stages(), torch.bfloat16, True, True, seed=2)
    assert launches == first
    chunks = -(-SIZE // DEFAULT.chunk)
    assert {grid for _, grid, _, _ in first} == {(2, chunks), (2,), (2, DEFAULT.sparse_programs)}


def test_stages_that_no_row_needs_are_left_out(launches: list[Launch]) -> None:
    call(Stages(adjust=False, draw=False, top_k=False, top_p=False), torch.bfloat16, False, True)
    assert [name for name, *_ in launches] == ["stats_kernel", "finish_kernel"]
    launches.clear()
    call(Stages(adjust=False, draw=True, top_k=False, top_p=False), torch.bfloat16, False, True)
    assert [name for name, *_ in launches] == ["stats_kernel", "begin_kernel", "draw_kernel", "finish_kernel"]
    launches.clear()
    call(Stages(adjust=False, draw=True, top_k=True, top_p=False), torch.bfloat16, False, True)
    # 1 + 11 + 7 bits of bf16 in digits of 4
    assert [name for name, *_ in launches] == ["stats_kernel", "begin_kernel", *["digit_kernel"] * 5, "settle_kernel", "draw_kernel", "finish_kernel"]


def test_compile_jobs_are_what_is_launched(launches: list[Launch]) -> None:
    for dtype, adjust, draw, fed in product((torch.bfloat16, torch.float32), (False, True), (False, True), (False, True)):
        for masked in (False, adjust):
            call(Stages(adjust=adjust, draw=draw), dtype, masked, fed)
        one, wide = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.float64)
        logprobs(torch.zeros(2, SIZE, dtype=dtype), one, one, one, wide[:, 0].contiguous(), wide.int(), wide, Scratch.empty(2, SIZE))

    def key(name: str, types: dict[str, str], constants: dict[str, Any]) -> tuple[Any, ...]:
        # arguments that a step does not have are bound to some other tensor and not read
        unread = {"SLOTS", "FEED", "MASK", "LOGITS"} if name in ("bias_kernel", "penalty_kernel", "begin_kernel") else {"SLOTS", "FEED", "MASK"}
        return name, frozenset((n, t) for n, t in types.items() if n not in unread), frozenset(constants.items())

    launched = {key(name, types, constants) for name, _, types, constants in launches}
    jobs = {key(job.function.name, dict(job.types), {**job.constants, "num_warps": job.warps}) for job in compile_jobs(vocabulary=SIZE)}
    assert launched == jobs


def test_scratch_is_as_small_as_it_says() -> None:
    per_position = {name: int(np.prod(shape)) * dtype.itemsize for name, (dtype, shape) in scratch_shapes(1, SIZE).items()}
    assert per_position.pop("scores") == 8 * SIZE
    assert sum(per_position.values()) < 22_000
    assert all(shape[0] == 7 for _, shape in scratch_shapes(7, SIZE).values())
