"""Staging alone, on the host, with an H200's tiles: whatever the scheduler plans fits the lists that the bounds give, and every token has its task.

No kernel runs: limits, batches and contexts may be as varied as a server's.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from twinfer.bench.shapes import shape_config
from twinfer.engine.scheduler import Scheduler
from twinfer.fast import inputs
from twinfer.fast.buffers import TASK_LISTS, Buffers
from twinfer.fast.device import Device
from twinfer.fast.inputs import StagedStep, StepInputs
from twinfer.fast.shape import Shapes, StepShape, exact
from twinfer.invariants.ledger import Ledger
from twinfer.kernels.attention.tiles import SPLIT, tile_tokens
from twinfer.limits import Limits
from twinfer.plan import StepPlan
from twinfer.request import Request
from twinfer.sampling import SamplingParams

CONFIG = dataclasses.replace(shape_config("qwen3-0.6b"), num_layers=1, vocab_size=64, windows=(None,), hidden_size=16, intermediate_size=16)
H200 = Device("cpu", True, (9, 0), 132, "bfloat16", None)
GROUP = CONFIG.num_heads // CONFIG.num_kv_heads


def limits(page_size: int, max_batch: int, max_context: int, max_step_tokens: int, look_ahead: int) -> Limits:
    return Limits(
        max_batch=max_batch, max_step_tokens=max_step_tokens, max_chunk_tokens=max_step_tokens, warmup_tokens=1, max_context=max_context,
        max_step_context=max_batch * max_context, max_logit_tokens=16, page_size=page_size, num_pages=-(-max_batch * max_context // page_size),
        look_ahead=look_ahead,
    )  # fmt: skip


def covered(plan: StepPlan, staged: StagedStep, host: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    """Every token is in the tile of one list, and that list holds all the splits of its keys, in order; padding tokens are in none."""
    counts = host["task_counts"].reshape(len(TASK_LISTS), -1)[:, 0].tolist()
    seen: set[tuple[int, int]] = set()
    places = 0
    for launch in staged.launches:
        size = tile_tokens(launch.tile, GROUP)
        splits: dict[tuple[int, int], list[int]] = {}
        for row, first, split, _ in host[launch.tasks].reshape(-1, 4)[: counts[TASK_LISTS.index(launch.tasks)]].tolist():
            splits.setdefault((row, first), []).append(split)
        for (row, first), found in splits.items():
            count = min(size, int(plan.length[row]) - first)
            end = int(plan.start[row]) + first + count
            assert found == (list(range(-(-end // SPLIT))) if launch.tasks == "spread_tasks" else [0])
            places += count * len(found) if len(found) > 1 else 0
            tokens = {(row, first + i) for i in range(count)}
            assert not tokens & seen
            seen |= tokens
    assert seen == {(row, i) for row in range(plan.num_rows) for i in range(int(plan.length[row]))}
    assert places <= host["spread_tasks"].shape[0] * host["spread_tasks"].shape[1]
    assert sum(counts) == sum(counts[TASK_LISTS.index(launch.tasks)] for launch in staged.launches), "a list that no launch walks holds tasks"


SHAPES = [(64, 64, 1100, 2048, 1), (64, 8, 520, 96, 0), (16, 24, 900, 300, 1), (6, 4, 24, 24, 0), (1, 5, 70, 40, 1), (256, 16, 5000, 512, 2)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whatever_is_planned_can_be_staged(shape: tuple[int, int, int, int, int], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = run(shape, graphs, monkeypatch)
    assert "spread_tasks" in lists
    assert shape[0] % 64 or len(lists) > 1


def test_two_kinds_of_rows_that_forget_each_other_overflow_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "count_tasks", lambda *arguments: (0, 0))

    def run_all() -> None:
        for shape in SHAPES:
            run(shape, False, monkeypatch)

    with pytest.raises(ValueError, match="attention_"):
        run_all()


def run(shape: tuple[int, int, int, int, int], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Stages every step of 40 requests; the task lists that were used."""
    monkeypatch.setattr(inputs, "update_page_table", lambda *arguments: None)
    within = limits(*shape)
    ledger = Ledger(within, CONFIG, "bfloat16")
    buffers = Buffers(CONFIG, ledger, torch.device("cpu"), within.look_ahead + 1)
    staging, shapes = StepInputs(CONFIG, within, buffers, H200), Shapes(within)
    scheduler = Scheduler(within, partial(Ledger(within, CONFIG, "bfloat16").host, owner="engine"))
    random = np.random.default_rng(shape[0])
    for i in range(40):
        length, new = int(random.integers(1, within.max_context)), int(random.integers(1, 40))
        params = SamplingParams(max_tokens=min(new, within.max_context - length), temperature=0.0)
        scheduler.add(Request(tuple(random.integers(0, 64, length).tolist()), params), i, 0, 0, frozenset())
    lists: set[str] = set()
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.delivered(plan)
        chosen: StepShape = shapes.of(plan) if graphs else exact(plan)
        staged = staging.stage(plan, chosen)
        covered(plan, staged, buffers.staging[staged.set])
        assert chosen.num_tokens <= len(buffers.tensors["residual"])
        lists |= {launch.tasks for launch in staged.launches}
        scheduler.commit(plan, np.zeros(int(plan.num_samples.sum()), np.int32))
    return lists
