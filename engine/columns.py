"""SlotColumns: the sampling parameters of running sequences as arrays by batch slot, gathered into a plan's columns. No decisions.

Gathering is cached: as long as the same slots decode in the same order, the columns of the last step are handed out again, since they are values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.sequence import Sequence
from twinfer.plan import SAMPLING_DTYPES, SamplingColumns

I32 = NDArray[np.int32]


def shared(column: NDArray[Any]) -> NDArray[Any]:
    """The column, made read-only: several plans hold it, and a check that passed once need not be made again."""
    column.setflags(write=False)
    return column


class SlotColumns:
    """One array [max_batch] a field, made by `make(name)` (the ledger's host allocator)."""

    def __init__(self, make: Callable[[str], NDArray[Any]]) -> None:
        self._by_slot = {name: make(name) for name in SAMPLING_DTYPES}
        self._special: dict[int, Sequence] = {}  # by slot: those whose bias or seen tokens are part of the plan
        self._last: tuple[I32, SamplingColumns] | None = None

    def set(self, slot: int, sequence: Sequence) -> None:
        """Takes over the parameters of a sequence that enters `slot`."""
        params = sequence.params
        values = {
            "temperature": params.temperature,
            "top_k": min(params.top_k, 2**31 - 1),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "seed": sequence.seed,
            "sample": sequence.sample,
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        }
        for name, value in values.items():
            self._by_slot[name][slot] = value
        if params.has_penalties or params.logit_bias or params.min_tokens:
            self._special[slot] = sequence
        self._last = None

    def clear(self, slot: int) -> None:
        """Forgets the sequence that leaves `slot`."""
        self._special.pop(slot, None)
        self._last = None

    def gather(self, slots: I32, samples: I32, known: I32) -> SamplingColumns:
        """Columns for the rows `slots`; `samples` is their num_samples (rows that don't sample get no bias and no seen tokens), `known` the tokens
        that each sequence has before the step samples, read back or not."""
        special = bool(self._special)
        if not special and self._last is not None and (self._last[0] is slots or np.array_equal(self._last[0], slots)):
            self._last = (slots, self._last[1])
            return self._last[1]
        bias, seen = _Csr(), _Csr()
        if special:
            wanted = np.isin(slots, np.fromiter(self._special, np.int32)) & (samples > 0)
            for row in np.flatnonzero(wanted).tolist():
                sequence = self._special[int(slots[row])]
                _add_bias(bias, row, sequence, int(known[row]) - sequence.num_prompt)
                if sequence.params.has_penalties:
                    seen.add(row, sequence.seen)
        columns = SamplingColumns(
            **{name: shared(column[slots]) for name, column in self._by_slot.items()},
            bias_indptr=shared(bias.indptr(len(slots))),
            bias_ids=shared(np.array(bias.ids, np.int32)),
            bias_values=shared(np.array(bias.values, np.float32)),
            seen_indptr=shared(seen.indptr(len(slots))),
            seen_ids=shared(np.array(seen.ids, np.int32)),
            seen_counts=shared(np.array(seen.values, np.int32)),
        )
        self._last = None if special else (slots, columns)
        return columns


class _Csr:
    """Rows of (token id, value), being built: most rows have none, so only those that have some are added, in order."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by row
        self.ids: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, entries: Mapping[int, float]) -> None:
        self._counts[row] = len(entries)
        self.ids.extend(entries)
        self.values.extend(entries.values())

    def indptr(self, num_rows: int) -> I32:
        """Where each row's entries begin, and where the last one's end."""
        starts = np.zeros(num_rows + 1, np.int32)
        for row, count in self._counts.items():
            starts[row + 1] = count
        return np.add.accumulate(starts, out=starts)


def _add_bias(csr: _Csr, row: int, sequence: Sequence, num_generated: int) -> None:
    """What is added to logits: the caller's bias, and -inf where min_tokens still bans an end token."""
    bias = dict(sequence.params.logit_bias)
    if num_generated < sequence.params.min_tokens:
        bias.update(dict.fromkeys(sorted(sequence.end_tokens), -math.inf))
    csr.add(row, bias)
