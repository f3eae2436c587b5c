"""GhostExecutor: an executor without tensors, for tests of everything around the model. Each KV slot holds the history that wrote it.

A cache slot keeps (token, hash of all tokens up to it). A row reads every position of its context through its page list, as attention does; the
chain of hashes must be unbroken, and the next token is a function of all that was read. So a wrong page, a stale page, a page shared under the
wrong prefix or sealed before it was written is a GhostMismatch at once or a wrong token against the oracle. Runs thousands of steps a second.

In a model that keeps states, a state slot holds the hash of the history that wrote it. A row goes on from it as a recurrence does: it can't be read at
an earlier length, and only a row that begins at 0 may find anything in it. A snapshot holds the hash that its state slot had when it was saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.flatten import STAGING, FlatStep, Staging, flatten
from twinfer.errors import TwinferError
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import StepPlan
from twinfer.table import PageTable

U64 = NDArray[np.uint64]
_MIX = (1 << 64) - 1


class GhostMismatch(TwinferError):
    """A row read a cache slot or a state slot that does not hold its own history."""


def mix(history: int, token: int) -> int:
    """Hash of a history extended by one token, 64 bits (multiply and xor-shift; quality matters only for telling histories apart)."""
    value = (history ^ (token + 1)) * 0x9E3779B97F4A7C15 & _MIX
    return value ^ (value >> 29)


def _mix_columns(history: U64, tokens: NDArray[np.int32]) -> U64:
    value = (history ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    return value ^ (value >> np.uint64(29))


def next_token(history: int, seed: int, sample: int, greedy: bool, vocab_size: int) -> int:
    """The ghost's model: a fixed function of the whole history, and of seed and sample unless greedy."""
    if not greedy:
        history = mix(history ^ seed, sample)
    return mix(history, 7) % vocab_size


class GhostExecutor:
    """`make(name)` gives host arrays from the ledger. `history(request)` may name the true tokens of a sequence: then all are compared.

    As on a device, `launch` only stages and a step is computed as late as possible, in `collect`: a staging set, a page or a slot that was handed
    on too early shows.

    fail_on: called with each plan before it is computed; may raise, to inject failures.
    """

    name = "ghost"

    def __init__(self, limits: Limits, vocab_size: int, make: Callable[..., NDArray[Any]]) -> None:
        self.limits, self.vocab_size = limits, vocab_size
        self._staging = [Staging(**{name: make(name, copy=copy) for name in STAGING}) for copy in range(limits.look_ahead + 1)]
        self._feed = make("token_feed")
        self._table = PageTable(make("page_table"), make("page_counts"))
        num_slots = (limits.num_pages + 1) * limits.page_size
        self.slot_token = np.full(num_slots, -1, np.int32)
        self.slot_hash = np.zeros(num_slots, np.uint64)
        self.state_hash = np.full(limits.num_state_slots, 0xDEAD, np.uint64)
        self.snapshot_hash = np.full(limits.num_snapshots, 0xDEAD, np.uint64)
        self._launched: deque[tuple[StepPlan, FlatStep | Exception]] = deque()
        self._num_launched = 0
        self._broken: set[int] = set()  # sequences of failed steps: what a step in flight behind them computes for them is garbage, as on a device
        self.history: Callable[[int], list[int]] | None = None
        self.fail_on: Callable[[StepPlan], None] | None = None

    def launch(self, plan: StepPlan) -> None:
        """Flattens the step into its staging set; failures are kept for `collect`."""
        self._table.apply(plan.delta)
        staging = self._staging[self._num_launched % len(self._staging)]
        self._num_launched += 1
        try:
            self._launched.append((plan, flatten(plan, self._table, self.limits.page_size, staging)))
        except Exception as error:
            self._launched.append((plan, error))

    def collect(self) -> StepOutput:
        """Computes the oldest launched step."""
        plan, flat = self._launched.popleft()
        if isinstance(flat, Exception):
            raise flat
        try:
            if self.fail_on is not None:
                self.fail_on(plan)
        except Exception:
            self._broken.update(plan.sequence.tolist())
            self.snapshot_hash[plan.saves[:, 1]] = 0xBAD  # half written, perhaps
            raise
        return self._compute(plan, flat)

    def buffers(self) -> Mapping[str, Any]:
        arrays = {name: [getattr(staging, name) for staging in self._staging] for name in STAGING}
        return {**arrays, "page_table": self._table.pages, "page_counts": self._table.num_pages, "token_feed": self._feed}

    def close(self) -> None:
        self._launched.clear()

    def poison(self, pages: list[int]) -> None:
        """Overwrites pages that nobody may read."""
        for page in pages:
            at = page * self.limits.page_size
            self.slot_token[at : at + self.limits.page_size] = -1
            self.slot_hash[at : at + self.limits.page_size] = 0xDEAD

    def poison_states(self, slots: Sequence[int]) -> None:
        """Overwrites state slots that nobody may go on from."""
        self.state_hash[list(slots)] = 0xDEAD

    def poison_snapshots(self, snapshots: Sequence[int]) -> None:
        """Overwrites snapshots that nobody may restore."""
        self.snapshot_hash[list(snapshots)] = 0xDEAD

    def _compute(self, plan: StepPlan, flat: FlatStep) -> StepOutput:
        tokens: list[int] = []
        self.state_hash[plan.restores[:, 1]] = self.snapshot_hash[plan.restores[:, 0]]
        for row in range(flat.num_rows):
            final = self._row(plan, flat, row)
            slot = int(plan.slot[row])
            seed, sample = int(plan.sampling.seed[row]), int(plan.sampling.sample[row])
            greedy = float(plan.sampling.temperature[row]) == 0.0
            drawn = [next_token(final, seed, sample, greedy, self.vocab_size)] * int(plan.num_samples[row])
            self._feed[slot] = drawn[-1] if drawn else self._feed[slot]
            tokens.extend(drawn)
        self.snapshot_hash[plan.saves[:, 1]] = self.state_hash[plan.saves[:, 0]]
        sampled = np.array(tokens, np.int32)
        want = (plan.sampling.num_logprobs >= 0) & (plan.num_samples > 0)
        return StepOutput(
            step=plan.step,
            tokens=sampled,
            sampled=_flat_logprobs(sampled, plan.sampling.num_logprobs) if want.any() else None,
            scored=_flat_logprobs(plan.targets, plan.scored_logprobs) if len(plan.targets) else None,
            row_error={},
        )

    def _row(self, plan: StepPlan, flat: FlatStep, row: int) -> int:
        """Writes the row's tokens, reads its whole context and returns the hash of its history."""
        if int(plan.sequence[row]) in self._broken:
            return 0
        size, start, context = self.limits.page_size, int(flat.start[row]), int(flat.context[row])
        pages = flat.page_indices[flat.page_indptr[row] : flat.page_indptr[row + 1]].astype(np.int64)
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)[:context]
        running = int(self.slot_hash[slots[start - 1]]) if start else 0
        state, sequence = int(flat.state_slot[row]), int(plan.sequence[row])
        if state >= 0:
            before_row, running = running, int(self.state_hash[state]) if start else 0
            if running != before_row:
                raise GhostMismatch(f"sequence {sequence}: state slot {state} does not hold its history up to position {start}")
        for at in range(int(flat.row_indptr[row]), int(flat.row_indptr[row + 1])):
            token = int(flat.token_ids[at])
            token = token if token >= 0 else int(self._feed[-1 - token])
            running = mix(running, token)
            slot = int(flat.write_slots[at])
            self.slot_token[slot] = token
            self.slot_hash[slot] = running
        if state >= 0:
            self.state_hash[state] = running
        hashes, tokens = self.slot_hash[slots], self.slot_token[slots]
        before = np.concatenate([np.zeros(1, np.uint64), hashes[:-1]])
        broken = np.flatnonzero(_mix_columns(before, tokens) != hashes)
        if len(broken):
            at = int(broken[0])
            raise GhostMismatch(f"sequence {sequence}: position {at} (page {int(slots[at]) // size}) does not hold its history")
        if self.history is not None:
            known = self.history(sequence)[:context]
            if tokens.tolist() != known:
                wrong = next(i for i, (a, b) in enumerate(zip(tokens.tolist(), known, strict=True)) if a != b)
                raise GhostMismatch(f"sequence {sequence}: position {wrong} holds token {int(tokens[wrong])}, its own is {known[wrong]}")
        return int(hashes[-1])


def _flat_logprobs(tokens: NDArray[np.int32], num_alternatives: NDArray[np.int32]) -> LogprobColumns:
    """Log probabilities of a model that is always sure: 0 for the token, the others in order of their ids."""
    k = max(0, int(num_alternatives.max(initial=0)))
    top = np.tile(np.arange(k, dtype=np.int32), (len(tokens), 1))
    return LogprobColumns(np.zeros(len(tokens)), top, np.zeros((len(tokens), k)))
