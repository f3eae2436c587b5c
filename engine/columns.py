"""SlotColumns: the sampling parameters of running sequences as arrays by batch slot, gathered into a plan's columns. No decisions.

Gathering is cached: as long as the same slots decode in the same order, the columns of the last step are handed out again, since they are values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
            for slot, sampling, num_known in zip(slots.tolist(), samples.tolist(), known.tolist(), strict=True):
                sequence = self._special.get(slot)
                if sequence is not None and sampling:
                    _add_bias(bias, sequence, num_known - sequence.num_prompt)
                    _add_seen(seen, sequence)
                bias.end_row()
                seen.end_row()
        else:
            bias.skip(len(slots))
            seen.skip(len(slots))
        columns = SamplingColumns(
            **{name: shared(column[slots]) for name, column in self._by_slot.items()},
            bias_indptr=shared(np.array(bias.indptr, np.int32)),
            bias_ids=shared(np.array(bias.ids, np.int32)),
            bias_values=shared(np.array(bias.values, np.float32)),
            seen_indptr=shared(np.array(seen.indptr, np.int32)),
            seen_ids=shared(np.array(seen.ids, np.int32)),
            seen_counts=shared(np.array(seen.values, np.int32)),
        )
        self._last = None if special else (slots, columns)
        return columns


class _Csr:
    """Rows of (token id, value), being built."""

    def __init__(self) -> None:
        self.indptr = [0]
        self.ids: list[int] = []
        self.values: list[float] = []

    def end_row(self) -> None:
        self.indptr.append(len(self.ids))

    def skip(self, num_rows: int) -> None:
        self.indptr.extend([0] * num_rows)


def _add_bias(csr: _Csr, sequence: Sequence, num_generated: int) -> None:
    bias = dict(sequence.params.logit_bias)
    if num_generated < sequence.params.min_tokens:
        bias.update(dict.fromkeys(sorted(sequence.end_tokens), -math.inf))
    csr.ids.extend(bias)
    csr.values.extend(bias.values())


def _add_seen(csr: _Csr, sequence: Sequence) -> None:
    if sequence.params.has_penalties:
        csr.ids.extend(sequence.seen)
        csr.values.extend(sequence.seen.values())
