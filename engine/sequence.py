"""Sequence: one sample of one request and how far it has come. A record; who runs when is the scheduler's decision."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinfer.engine.prefix import Digest
from twinfer.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Identity and tokens of one sample.

    Invariants: tokens[:num_prompt] never changes; while running, 0 <= computed < known == len(tokens) + unread, where `computed` (kept in the
    scheduler's columns) counts the tokens that are in cache and `unread` those that the device has sampled and the host has not read; digests[i]
    belongs to tokens[: (i + 1) * page_size].
    """

    id: int
    request_id: int
    sample: int
    params: SamplingParams
    seed: int
    num_prompt: int
    max_new: int
    end_tokens: frozenset[int]
    root: Digest
    use_cache: bool
    tokens: array[int]
    leader: Sequence | None = None  # the request's first sample: the others wait for its prompt's pages instead of computing them again
    digests: list[Digest] = field(default_factory=list)
    points: list[int] = field(default_factory=list)  # lengths at which its state is wanted as a snapshot, those ahead, ascending
    passed: Digest | None = None  # key of the last snapshot that it left while generating
    slot: int = -1
    num_cached: int = 0
    num_preemptions: int = 0
    keeps_seen: bool = False  # whether the request has penalties
    seen: dict[int, int] = field(default_factory=dict)  # kept only then: token -> occurrences in the output (0: prompt only)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    def slice(self, start: int, end: int) -> NDArray[np.int32]:
        """tokens[start:end] as int32 (a copy)."""
        return np.frombuffer(self.tokens[start:end], np.int32)

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token)
        if self.keeps_seen:
            self.seen[token] = self.seen.get(token, 0) + 1
