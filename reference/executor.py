"""Reference. Slow on purpose: computes a StepPlan with the plain model, one step at a time. It holds the tensors; it decides nothing.

Buffers come from the ledger, each under the bound of its name. Logits exist for at most max_logit_tokens positions at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.engine.flatten import STAGING, FlatStep, Staging, flatten
from twinfer.errors import ExecutorLost, LimitError, StepFailed
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import StepPlan, most_logprobs
from twinfer.reference.cache import KVCache
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.qwen3 import Qwen3
from twinfer.reference.sampler import logprobs, sample
from twinfer.reference.state import SnapshotCache, StateCache
from twinfer.table import PageTable

I64 = NDArray[np.int64]


class ReferenceExecutor:
    """An Executor over `Qwen3`, or over `Hybrid` for the later types.

    weights: in the form of `expected_tensors`, of one dtype on one device, which are the executor's too (of a 16-bit model some may be float32).
    """

    name = "reference"

    def __init__(self, config: ModelConfig, limits: Limits, weights: Mapping[str, torch.Tensor], ledger: Ledger) -> None:
        self.limits = limits
        self.model: Qwen3 | Hybrid = Qwen3(config, weights) if config.model_type == "qwen3" else Hybrid(config, weights)
        self._arrays = {name: ledger.host(name, owner="reference") for name in (*STAGING, "token_feed")}
        self._staging = Staging(**{name: self._arrays[name] for name in STAGING})
        self._table = PageTable(ledger.host("page_table", owner="reference"), ledger.host("page_counts", owner="reference"))
        self._kv = {name: ledger.allocate(name, self._make, owner="reference") for name in ("kv_keys", "kv_values")}
        self.cache = KVCache(self._kv["kv_keys"].unbind(0), self._kv["kv_values"].unbind(0))
        names = ("conv_histories", "recurrent_states") if config.num_gdn_layers else ()
        self._states = {name: ledger.allocate(name, self._make, owner="reference") for name in names}
        self.states = StateCache(*(self._states[name].unbind(0) for name in names)) if names else StateCache((), ())
        kept = ("conv_snapshots", "recurrent_snapshots") if names else ()
        self._snapshots = {name: ledger.allocate(name, self._make, owner="reference") for name in kept}
        self._done: deque[StepOutput | StepFailed | ExecutorLost] = deque()

    def _make(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """The ledger's allocator: NaN, so that a slot read before it is written can't look like a value."""
        try:
            return torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=self.model.device)
        except RuntimeError as error:  # torch has no class of its own for a CPU that is out of memory
            what = f"a buffer of {list(shape)} {dtype} can't be allocated"
            raise LimitError(f"{what}: lower num_pages, num_state_slots or num_snapshots ({str(error).splitlines()[0]})") from None

    def launch(self, plan: StepPlan) -> None:
        """Computes the step at once; a failure in it is kept for `collect`."""
        self._table.apply(plan.delta)
        try:
            with torch.inference_mode():
                self._done.append(self._compute(plan))
        except torch.AcceleratorError as error:  # a device error stays: no later step can run
            self._done.append(ExecutorLost(f"step {plan.step}: {error}"))
        except Exception as error:
            self._done.append(StepFailed(f"step {plan.step}: {type(error).__name__}: {error}"))

    def collect(self) -> StepOutput:
        result = self._done.popleft()
        if isinstance(result, Exception):
            raise result
        return result

    def buffers(self) -> Mapping[str, Any]:
        return {**self._arrays, **self._kv, **self._states, **self._snapshots, "page_table": self._table.pages, "page_counts": self._table.num_pages}

    def close(self) -> None:
        """Lets go of weights, cache and states; the engine above has ended every request."""
        self._done.clear()
        self._kv.clear()
        self.model.weights = {}
        self.cache = KVCache((), ())
        self._states.clear()
        self._snapshots.clear()
        self.states = StateCache((), ())

    def _compute(self, plan: StepPlan) -> StepOutput:
        flat = flatten(plan, self._table, self.limits.page_size, self._staging)
        feed, ids = self._arrays["token_feed"], flat.token_ids
        ids[:] = np.where(ids < 0, feed[np.maximum(-1 - ids, 0)], ids)  # tokens that this executor sampled itself
        if not plan.restores.size and not plan.saves.size:
            hidden = self._forward(flat)
        else:
            snapshots = SnapshotCache(self.states, self._snapshots["conv_snapshots"], self._snapshots["recurrent_snapshots"])
            for snapshot, slot in plan.restores.tolist():
                snapshots.restore(snapshot, slot)
            hidden = self._forward(flat)
            for slot, snapshot in plan.saves.tolist():
                snapshots.save(slot, snapshot)
        errors: dict[int, str] = {}
        tokens, sampled = self._sample(plan, flat, hidden, errors)
        drawn = plan.num_samples > 0
        feed[plan.slot[drawn]] = tokens[(np.cumsum(plan.num_samples) - 1)[drawn]]
        scored = self._score(plan, flat, hidden, errors)
        return StepOutput(plan.step, tokens, sampled, scored, errors)

    def _forward(self, flat: FlatStep) -> torch.Tensor:
        """Hidden vectors [num_tokens, hidden_size]; keys, values and states of the step are in cache then."""
        if isinstance(self.model, Hybrid):
            return self.model.forward(flat, self.cache, self.states, flat.state_slot.tolist())
        return self.model.forward(flat, self.cache)

    def _sample(
        self, plan: StepPlan, flat: FlatStep, hidden: torch.Tensor, errors: dict[int, str]
    ) -> tuple[NDArray[np.int32], LogprobColumns | None]:
        """Draws from the last num_samples positions of each row."""
        rows = np.repeat(np.arange(plan.num_rows), plan.num_samples)
        back = _count_down(plan.num_samples)  # 1 is a row's last token
        at = flat.row_indptr[1:][rows] - back
        positions = (flat.context[rows] - back + 1).astype(np.int64)
        num_top = most_logprobs(plan.sampling.num_logprobs, plan.num_samples)
        tokens = np.zeros(len(rows), np.int32)
        columns = []
        for begin, end in self.limits.logit_tiles(len(rows)):
            part = slice(begin, end)
            logits = self.model.logits(hidden[torch.from_numpy(at[part]).to(hidden.device)])  # [tile, vocab_size]
            drawn = sample(logits, rows[part], positions[part], plan.sampling, plan.mask)
            tokens[part] = drawn.tokens
            errors.update({int(rows[part][i]): what for i, what in drawn.errors.items()})
            if num_top >= 0:
                columns.append(logprobs(logits, drawn.tokens, num_top))
        return tokens, _joined(columns) if columns else None

    def _score(self, plan: StepPlan, flat: FlatStep, hidden: torch.Tensor, errors: dict[int, str]) -> LogprobColumns | None:
        """Scores the given next token at the first num_scored positions of each row."""
        if len(plan.targets) == 0:
            return None
        rows = np.repeat(np.arange(plan.num_rows), plan.num_scored)
        into = plan.num_scored[rows] - _count_down(plan.num_scored)  # 0 is a row's first token
        at = flat.row_indptr[:-1][rows] + into
        num_top = most_logprobs(plan.scored_logprobs, plan.num_scored)
        columns, first = [], dict[int, str]()
        for begin, end in self.limits.logit_tiles(len(rows)):
            part = slice(begin, end)
            logits = self.model.logits(hidden[torch.from_numpy(at[part]).to(hidden.device)])  # [tile, vocab_size]
            scores = logprobs(logits, plan.targets[part], num_top)
            for i in np.flatnonzero(np.isnan(scores.logprob)).tolist():
                row, position = int(rows[part][i]), int(flat.start[rows[part][i]] + into[part][i])
                first.setdefault(row, f"the logits at prompt position {position} are not numbers")
            columns.append(scores)
        errors.update(first)  # a row's first is told, which comes before what it samples
        return _joined(columns)


def _count_down(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """For counts [3, 1]: [3, 2, 1, 1]."""
    ends = np.cumsum(counts)
    return np.repeat(ends, counts) - np.arange(int(ends[-1]) if len(ends) else 0)


def _joined(parts: list[LogprobColumns]) -> LogprobColumns:
    return LogprobColumns(
        np.concatenate([p.logprob for p in parts]),
        np.concatenate([p.top_ids for p in parts]),
        np.concatenate([p.top_logprobs for p in parts]),
    )
