"""RowBuilder: turns chosen rows (slot, first position, length) into the columns of a StepPlan. It chooses nothing and reserves nothing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.columns import SlotColumns
from twinfer.engine.order import Order
from twinfer.engine.sequence import Sequence
from twinfer.plan import StepPlan, from_device
from twinfer.table import TableDelta

I32 = NDArray[np.int32]
_NO_TOKENS = np.empty(0, np.int32)
_NO_TOKENS.setflags(write=False)


class RowBuilder:
    """Keeps each slot's next token: the last one that is known, or `from_device(slot)` while the host has not read it.

    `by_slot` is the scheduler's list of sequences, which this only reads.
    """

    def __init__(self, make: Callable[[str], NDArray[Any]], by_slot: Seq[Sequence | None], columns: SlotColumns) -> None:
        self._by_slot, self._columns = by_slot, columns
        self._last_token: I32 = make("last_token")

    def enter(self, slot: int, sequence: Sequence) -> None:
        """A sequence has taken `slot`."""
        self._last_token[slot] = sequence.tokens[-1]

    def await_tokens(self, slots: I32) -> None:
        """The device is about to sample for these slots."""
        self._last_token[slots] = from_device(0) - slots

    def read_tokens(self, slots: I32, tokens: I32, latest: NDArray[np.bool_]) -> None:
        """The host has read what was sampled for these slots; `latest` where no later sample is in flight."""
        self._last_token[slots[latest]] = tokens[latest]

    def build(
        self,
        step: int,
        delta: TableDelta,
        order: Order,
        slots: I32,
        start: I32,
        lengths: I32,
        known: I32,
        identity: NDArray[np.int64],
        scored_logprobs: I32,
        state_slot: I32,
        copies: tuple[I32, I32],
    ) -> StepPlan:
        """The plan of step number `step`. `known` is by row, `identity`, `scored_logprobs` and `state_slot` are by slot; `copies`: restores and saves."""
        restores, saves = copies
        if lengths is order.ones and slots is order.slots and not order.scores:  # every running sequence decodes: nothing else has changed
            return StepPlan(
                step=step,
                delta=delta,
                slot=slots,
                sequence=order.identity,
                start=start,
                length=lengths,
                num_samples=order.ones,
                num_scored=order.zeros,
                state_slot=order.state_slot,
                tokens=self._last_token[slots],
                targets=_NO_TOKENS,
                scored_logprobs=order.scored_logprobs,
                sampling=self._columns.gather(slots, order.ones, known),
                restores=restores,
                saves=saves,
            )
        samples = (start + lengths == known).astype(np.int32)
        targets, num_scored, scored = _NO_TOKENS, np.zeros(len(slots), np.int32), scored_logprobs[slots]
        if int(scored.max()) >= 0:
            targets, num_scored = self._targets(slots, start, lengths, scored)
        return StepPlan(
            step=step,
            delta=delta,
            slot=slots,
            sequence=identity[slots],
            start=start,
            length=lengths,
            num_samples=samples,
            num_scored=num_scored,
            state_slot=state_slot[slots],
            tokens=self._tokens(slots, start, lengths, samples),
            targets=targets,
            scored_logprobs=scored,
            sampling=self._columns.gather(slots, samples, known),
            restores=restores,
            saves=saves,
        )

    def _tokens(self, slots: I32, start: I32, lengths: I32, samples: I32) -> I32:
        """Tokens of all rows, one row after another."""
        # A row of one token that is not its sequence's last known one (a chunk of 1) must be read from the sequence.
        last = (lengths == 1) & (samples > 0)
        if last.all():
            tokens: I32 = self._last_token[slots]
            return tokens
        parts = [
            self._last_token[slot : slot + 1] if is_last else self._sequence_at(slot).slice(first, first + length)
            for slot, first, length, is_last in zip(slots.tolist(), start.tolist(), lengths.tolist(), last.tolist(), strict=True)
        ]
        return np.concatenate(parts)

    def _targets(self, slots: I32, start: I32, lengths: I32, scored: I32) -> tuple[I32, I32]:
        """Prompt tokens to score: position p of a row is scored against prompt token p + 1."""
        targets, counts = [_NO_TOKENS], np.zeros(len(slots), np.int32)
        for row in np.flatnonzero(scored >= 0).tolist():
            sequence, first = self._sequence_at(int(slots[row])), int(start[row]) + 1
            given = sequence.slice(first, min(first + int(lengths[row]), sequence.num_prompt))
            targets.append(given)
            counts[row] = len(given)
        return np.concatenate(targets), counts

    def _sequence_at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None, f"slot {slot} is taken"
        return sequence
