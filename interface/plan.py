"""StepPlan: everything an executor needs to know of one step, as a value of integer columns. It decides nothing and holds no tensors.

Prefill, chunk, decode and verify rows differ only in length. A plan is drawn by property tests, logged, replayed on the other engine and
shrunk; `expand` gives its self-contained form for tests and oracles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinfer.limits import ceil_div
from twinfer.table import PageTable, TableDelta

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]

PLAIN_FORMAT = "plain"  # keys and values in the model's dtype

SAMPLING_DTYPES: dict[str, str] = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition": "float32",
    "presence": "float32",
    "frequency": "float32",
    "seed": "uint64",
    "sample": "int32",
    "num_logprobs": "int32",
}
"""Sampling columns with one entry a row, and their dtypes: bounds, laws and the scheduler's own columns follow this table."""

SAMPLING_LIST_DTYPES: dict[str, str] = {
    "bias_indptr": "int32",
    "bias_ids": "int32",
    "bias_values": "float32",
    "seen_indptr": "int32",
    "seen_ids": "int32",
    "seen_counts": "int32",
}
"""Sampling columns in CSR form, and their dtypes."""

ROW_DTYPES: dict[str, str] = {
    "slot": "int32",
    "sequence": "int64",
    "start": "int32",
    "length": "int32",
    "num_samples": "int32",
    "num_scored": "int32",
    "state_slot": "int32",
    "scored_logprobs": "int32",
}
"""Columns of a plan with one entry a row, and their dtypes."""

COPY_COLUMNS = ("restores", "saves")
"""Columns of a plan that hold pairs: one entry a copy between a snapshot and a state slot, both int32."""

TOKEN_DTYPES: dict[str, str] = {"tokens": "int32", "targets": "int32", "positions": "int32", "mask": "uint32"}
"""Columns of a plan that are counted otherwise (the last two may be None), and their dtypes."""


def most_logprobs(num_logprobs: I32, counts: I32) -> int:
    """Alternatives that the rows with positions ask for at most, -1 when none asks. num_logprobs and counts (positions) [num_rows]."""
    if not num_logprobs.size or int(np.maximum.reduce(num_logprobs)) < 0:
        return -1  # the usual step, at a tenth of the time
    asking = num_logprobs[counts > 0]
    return int(asking.max()) if asking.size else -1


def from_device(slot: int) -> int:
    """The entry of `StepPlan.tokens` that stands for the token which the device sampled last for a batch slot: the host has not read it yet."""
    return -1 - slot


_NO_COPIES = np.empty((0, 2), np.int32)
_NO_COPIES.setflags(write=False)


def no_copies() -> I32:
    """Pairs of a step that restores or saves nothing, [0, 2] int32, always the same array."""
    return _NO_COPIES


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """How each row's tokens are chosen; one entry a row, read only where the row samples.

    temperature, top_p, min_p        [num_rows] float32
    top_k                            [num_rows] int32, 0 is off
    repetition, presence, frequency  [num_rows] float32 penalties (1, 0, 0 are off)
    seed                             [num_rows] uint64
    sample                           [num_rows] int32, index among the request's samples
    num_logprobs                     [num_rows] int32: -1 none, 0 the token's own, k with k alternatives
    bias_indptr [num_rows+1], bias_ids, bias_values        CSR of token id -> float32 added to the logit (-inf bans)
    seen_indptr [num_rows+1], seen_ids, seen_counts        CSR of token ids seen by rows with penalties, ids distinct within a row;
                                                           count is the number of occurrences in the output (0: in the prompt only)
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition: F32
    presence: F32
    frequency: F32
    seed: U64
    sample: I32
    num_logprobs: I32
    bias_indptr: I32
    bias_ids: I32
    bias_values: F32
    seen_indptr: I32
    seen_ids: I32
    seen_counts: I32


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step.

    step         number of the step, counted from 0 by the engine
    delta        change of the page table, applied before the step
    slot         [num_rows] int32, batch slot of the row: names its page list; distinct within a step
    sequence     [num_rows] int64, identity of the sequence, which is one sample of a request (unique over the engine's life)
    start        [num_rows] int32, position of the row's first token = tokens that the cache holds for it
    length       [num_rows] int32, tokens computed in this row, at least 1
    num_samples  [num_rows] int32, positions to sample from: the last `num_samples` tokens of the row (0 for a chunk that is not the last)
    num_scored   [num_rows] int32, positions whose given next token is scored: the first `num_scored` tokens of the row
    state_slot   [num_rows] int32, -1 where the model keeps no state
    tokens       [num_tokens] int32, rows one after another; in a step planned ahead, a row of one token may hold `from_device(its slot)`
    targets      [sum num_scored] int32, next tokens to score
    scored_logprobs [num_rows] int32, alternatives to report at scored positions (like num_logprobs)
    sampling     how to choose
    positions    [num_tokens] int32 where they are not start, start + 1, ..; None otherwise
    mask         [num_rows, ceil(padded vocabulary / 32)] uint32 of allowed tokens, bit i of word j is token 32 j + i; None allows all
    kv_format    format tag of the pages that the step writes
    restores     [num_restores, 2] int32, pairs (snapshot, state slot): the slot gets a copy of the snapshot before the step's rows are computed
    saves        [num_saves, 2] int32, pairs (state slot, snapshot): the snapshot gets a copy of the slot after they are
    """

    step: int
    delta: TableDelta
    slot: I32
    sequence: I64
    start: I32
    length: I32
    num_samples: I32
    num_scored: I32
    state_slot: I32
    tokens: I32
    targets: I32
    scored_logprobs: I32
    sampling: SamplingColumns
    positions: I32 | None = None
    mask: NDArray[np.uint32] | None = None
    kv_format: str = PLAIN_FORMAT
    restores: I32 = field(default_factory=no_copies)
    saves: I32 = field(default_factory=no_copies)

    @property
    def num_rows(self) -> int:
        return len(self.slot)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def expand(self, table: PageTable, page_size: int) -> tuple[ExpandedRow, ...]:
        """The rows with their page lists, from a table that has this plan's delta applied (table.version == delta.base + 1)."""
        rows = []
        at = 0
        restored = {state: snapshot for snapshot, state in self.restores.tolist()}
        saved = dict(self.saves.tolist())
        for i in range(self.num_rows):
            start, length, slot = int(self.start[i]), int(self.length[i]), int(self.slot[i])
            num_pages = ceil_div(start + length, page_size)
            rows.append(
                ExpandedRow(
                    sequence=int(self.sequence[i]),
                    slot=slot,
                    start=start,
                    tokens=tuple(int(t) for t in self.tokens[at : at + length]),
                    pages=tuple(int(p) for p in table.pages[slot, :num_pages]),
                    num_samples=int(self.num_samples[i]),
                    num_scored=int(self.num_scored[i]),
                    state_slot=int(self.state_slot[i]),
                    restored_from=restored.get(int(self.state_slot[i]), -1),
                    saved_into=saved.get(int(self.state_slot[i]), -1),
                )
            )
            at += length
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class ExpandedRow:
    """One row of a plan with its page list written out: self-contained, for tests, oracles and people.

    state_slot, restored_from, saved_into   -1 for none: the state's slot, the snapshots that it is restored from before and saved into after
    """

    sequence: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    num_samples: int
    num_scored: int
    state_slot: int = -1
    restored_from: int = -1
    saved_into: int = -1
