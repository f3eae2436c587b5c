"""Prompts for gates: texts that the checkpoint knows, each with a beginning of its own, so that none hits what another gate left in the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import blake2b

NUM_OWN = 3  # ids at the head of a prompt that nothing else begins with: at 256 ids that is one coincidence in 16 million


class Prompts:
    """A gate's own supply. Deterministic: the gate's name decides, not the order in which gates run."""

    def __init__(self, name: str, document: Iterable[int], vocab_size: int) -> None:
        self._random = random.Random(int.from_bytes(blake2b(name.encode(), digest_size=8).digest()))
        self.document, self.vocab_size = tuple(document), vocab_size

    def text(self, length: int) -> tuple[int, ...]:
        """`length` tokens of the document from anywhere, end to beginning joined."""
        at = self._random.randrange(len(self.document))
        return tuple(self.document[(at + i) % len(self.document)] for i in range(length))

    def fresh(self, length: int) -> tuple[int, ...]:
        """A prompt that begins as no other does."""
        head = tuple(self._random.randrange(self.vocab_size) for _ in range(min(NUM_OWN, length)))
        return head + self.text(length - len(head))

    def other(self, token: int) -> int:
        """A token id that is not `token`."""
        return (token + 1 + self._random.randrange(self.vocab_size - 1)) % self.vocab_size
