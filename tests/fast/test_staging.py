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
    for launch in staged.launches.attention:
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
    assert sum(counts) == sum(counts[TASK_LISTS.index(launch.tasks)] for launch in staged.launches.attention), "a list that no launch walks holds tasks"


def padded(plan: StepPlan, staged: StagedStep, host: dict[str, np.ndarray], page_size: int) -> None:  # type: ignore[type-arg]
    """Padding is token 0 at position 0, written to the padding page."""
    rest = slice(plan.num_tokens, staged.shape.num_tokens)
    assert not host["token_ids"][rest].any()
    assert not host["positions"][rest].any()
    assert ((host["write_slots"][rest] >= 0) & (host["write_slots"][rest] < page_size)).all(), "padding is written to somebody's page"


SHAPES = [(64, 64, 1100, 2048, 1), (64, 8, 520, 96, 0), (16, 24, 900, 300, 1), (6, 4, 24, 24, 0), (1, 5, 70, 40, 1), (256, 16, 5000, 512, 2)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whatever_is_planned_can_be_staged(shape: tuple[int, int, int, int, int], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = run(shape, graphs, monkeypatch)
    assert "spread_tasks" in lists
    assert shape[0] % 64 or len(lists) > 1


def test_rows_that_share_a_prefix_list_it_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    most = run_shared(monkeypatch)
    assert most > 1.5 * SHARED_POOL * SHARED[0] / SPLIT, "no step had more splits than the pool's pages make up"


class Stager:
    """A scheduler, and staging of all that it plans, without a device; `lists` are the task lists that were used, `most` the longest list of splits."""

    def __init__(self, within: Limits, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inputs, "update_page_table", lambda *arguments: None)
        ledger = Ledger(within, CONFIG, "bfloat16")
        self.limits, self.graphs = within, graphs
        self.buffers = Buffers(CONFIG, ledger, torch.device("cpu"), within.look_ahead + 1)
        self.staging, self.shapes = StepInputs(CONFIG, within, self.buffers, H200), Shapes(within)
        self.scheduler = Scheduler(within, partial(Ledger(within, CONFIG, "bfloat16").host, owner="engine"))
        self.lists: set[str] = set()
        self.most = self.num_requests = 0

    def add(self, prompt: list[int], new: int) -> None:
        params = SamplingParams(max_tokens=min(new, self.limits.max_context - len(prompt)), temperature=0.0)
        self.scheduler.add(Request(tuple(prompt), params), self.num_requests, 0, 0, frozenset())
        self.num_requests += 1

    def drain(self) -> None:
        """Stages and checks every step until nothing is left."""
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            assert plan is not None
            self.scheduler.delivered(plan)
            chosen: StepShape = self.shapes.of(plan) if self.graphs else exact(plan)
            staged = self.staging.stage(plan, chosen)
            host = self.buffers.staging[staged.set]
            covered(plan, staged, host)
            padded(plan, staged, host, self.limits.page_size)
            assert chosen.num_tokens <= len(self.buffers.tensors["residual"])
            self.lists |= {launch.tasks for launch in staged.launches.attention}
            self.most = max(self.most, int(host["task_counts"].reshape(len(TASK_LISTS), -1)[TASK_LISTS.index("spread_tasks"), 0]))
            self.scheduler.commit(plan, np.zeros(int(plan.num_samples.sum()), np.int32))


def run(shape: tuple[int, int, int, int, int], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Stages every step of 40 requests; the task lists that were used."""
    stager = Stager(limits(*shape), graphs, monkeypatch)
    random = np.random.default_rng(shape[0])
    for _ in range(40):
        length, new = int(random.integers(1, stager.limits.max_context)), int(random.integers(1, 40))
        stager.add(random.integers(0, 64, length).tolist(), new)
    stager.drain()
    return stager.lists


# Rows over one prompt of 40 pages, each with two or three pages of its own; with pages this small all of them spread.
SHARED = (16, 24, 900, 300, 1)
SHARED_POOL = 40 + 24 * 3


def run_shared(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stages every step of a prompt and then of requests that begin with it, from a pool that holds it once; the longest list of splits."""
    stager = Stager(dataclasses.replace(limits(*SHARED), num_pages=SHARED_POOL), True, monkeypatch)
    prompt = np.random.default_rng(1).integers(0, 64, 640).tolist()
    stager.add(prompt, 1)
    stager.drain()
    for i in range(SHARED[1]):
        stager.add([*prompt, i], 24)
    stager.drain()
    return stager.most
