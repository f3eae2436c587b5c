"""Count: a number with what it counts, as people write it ("1 token", "3000 tokens"). Words for messages; nothing computes with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """A number and its noun in the singular (and in the plural where that takes more than an s).

    `str` and `repr` are the words; a format such as `:,` is the number's.
    """

    number: int
    noun: str
    many: str = ""

    def __format__(self, spec: str) -> str:
        return f"{self.number:{spec}} {self.noun if self.number == 1 else self.many or self.noun + 's'}"

    def __repr__(self) -> str:
        return format(self)
