"""Units: the closed set of things that buffers count, and the algebra that refuses to mix them. Not a general unit library.

The outage that this prevents: a page list, counted by reference, was sized in pages of the pool. Here the two are different units.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from twinfer.errors import TwinferError


class Unit(Enum):
    """What one entry of a buffer stands for; the value is the plural that errors and tables print."""

    ROWS = "rows"
    TOKENS = "tokens"
    PAGES = "pages"
    PAGE_REFERENCES = "page references"
    STATE_SLOTS = "state slots"
    SNAPSHOTS = "snapshots"
    TASKS = "tasks"
    ELEMENTS = "elements"  # entries with no unit of their own: vocabulary, logit bias, alternatives of a logprob
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Dimension:
    """A product of powers of units: `exponents` holds the non-zero ones in the order of `Unit`; none of them is the dimensionless one."""

    exponents: tuple[tuple[Unit, int], ...] = ()

    def __mul__(self, other: Dimension) -> Dimension:
        return self._combine(other, 1)

    def __truediv__(self, other: Dimension) -> Dimension:
        return self._combine(other, -1)

    def _combine(self, other: Dimension, sign: int) -> Dimension:
        powers = dict(self.exponents)
        for unit, power in other.exponents:
            powers[unit] = powers.get(unit, 0) + sign * power
        return Dimension(tuple((unit, powers[unit]) for unit in Unit if powers.get(unit)))

    def by_reference(self) -> Dimension:
        """The same dimension with page references in the place of pages."""
        powers = dict(self.exponents)
        pages = powers.pop(Unit.PAGES, 0)
        powers[Unit.PAGE_REFERENCES] = powers.get(Unit.PAGE_REFERENCES, 0) + pages
        return Dimension(tuple((unit, powers[unit]) for unit in Unit if powers.get(unit)))

    def __str__(self) -> str:
        if not self.exponents:
            return "one"
        over = [_power(unit, power) for unit, power in self.exponents if power > 0]
        under = [_power(unit, -power) for unit, power in self.exponents if power < 0]
        return "/".join([" * ".join(over) or "1", *under])


def _power(unit: Unit, power: int) -> str:
    return unit.value if power == 1 else f"{unit.value}^{power}"


def of(unit: Unit) -> Dimension:
    """The dimension of one unit."""
    return Dimension(((unit, 1),))


ONE = Dimension()
ROWS = of(Unit.ROWS)
TOKENS = of(Unit.TOKENS)
PAGES = of(Unit.PAGES)
PAGE_REFERENCES = of(Unit.PAGE_REFERENCES)
STATE_SLOTS = of(Unit.STATE_SLOTS)
SNAPSHOTS = of(Unit.SNAPSHOTS)
TASKS = of(Unit.TASKS)
ELEMENTS = of(Unit.ELEMENTS)
BYTES = of(Unit.BYTES)


class UnitMismatch(TwinferError, TypeError):
    """Two quantities of different units were added or compared; names both and the operation."""

    def __init__(self, operation: str, left: Dimension, right: Dimension) -> None:
        self.operation, self.left, self.right = operation, left, right
        super().__init__(f"{operation} of {left} and {right}: the units differ; only by_reference() turns pages into page references")
