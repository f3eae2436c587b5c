"""Expr: one tree for a bound's formula, with four readings: integers, compiled Python, z3 terms, text. Not for floats, and never simplified.

Python's `//` and `max` are absent on purpose: z3 terms do not take them, so a formula written with them would have fewer readings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinfer.invariants.unit import ONE, Dimension, UnitMismatch
from twinfer.limits import ceil_div as int_ceil_div


class Expr:
    """A quantity in whole numbers with a dimension. Build with `+ - *` and the functions of this file; compare with `<=`, `<` and `.equals`."""

    __slots__ = ()
    dimension: Dimension

    def __add__(self, other: Expr | int) -> Expr:
        return Binary("+", self, lift(other))

    def __sub__(self, other: Expr | int) -> Expr:
        return Binary("-", self, lift(other))

    def __mul__(self, other: Expr | int) -> Expr:
        return Binary("*", self, lift(other))

    def __le__(self, other: Expr | int) -> Relation:
        return Relation("<=", self, lift(other))

    def __lt__(self, other: Expr | int) -> Relation:
        return Relation("<", self, lift(other))

    def equals(self, other: Expr | int) -> Relation:
        """The relation `self == other` (the operator itself compares trees)."""
        return Relation("==", self, lift(other))

    def evaluate(self, env: Mapping[str, int]) -> int:
        """Reading one, integers: the value where `env` gives every symbol's. Raises KeyError naming a missing symbol."""
        raise NotImplementedError

    def source(self) -> str:
        """Reading two, Python source over the symbols' names; `compile_check` compiles it once."""
        raise NotImplementedError

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        """Reading three, a z3 term. Divisions become fresh integers whose defining constraints are appended to `side`.

        Where `env` has a division's text as a key, that term stands for it: a quotient that the assumptions speak of is then the same one here.
        """
        raise NotImplementedError

    def text(self, outer: int = 0) -> str:
        """Reading four, a formula for people; `outer` is the precedence of what surrounds it."""
        raise NotImplementedError

    def symbols(self) -> Iterator[Sym]:
        """Every symbol of the tree, left to right, repeats included."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A fixed number; it has a dimension like everything else, so that `+ 1` says one of what."""

    value: int
    dimension: Dimension = ONE

    def evaluate(self, env: Mapping[str, int]) -> int:
        return self.value

    def source(self) -> str:
        return str(self.value)

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        import z3

        return z3.IntVal(self.value)

    def text(self, outer: int = 0) -> str:
        return str(self.value)

    def symbols(self) -> Iterator[Sym]:
        return iter(())

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Sym(Expr):
    """A named number: a limit, a fact of a plan, or a number of the model. `label` is what people read where the name is not a formula."""

    name: str
    dimension: Dimension = ONE
    label: str = ""

    def evaluate(self, env: Mapping[str, int]) -> int:
        return env[self.name]

    def source(self) -> str:
        return self.name

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        return env[self.name]

    def text(self, outer: int = 0) -> str:
        return self.label or self.name

    def symbols(self) -> Iterator[Sym]:
        yield self

    __str__ = Expr.__str__


_PRECEDENCE = {"+": 1, "-": 1, "*": 2}
_SIGN = {"+": "+", "-": "-", "*": "x"}


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """`kind` is + - * min max cdiv. Sums, minima and maxima need equal dimensions; products add exponents, divisions subtract them."""

    kind: str
    left: Expr
    right: Expr
    dimension: Dimension = field(init=False)

    def __post_init__(self) -> None:
        left, right = self.left.dimension, self.right.dimension
        if self.kind == "*":
            dimension = left * right
        elif self.kind == "cdiv":
            dimension = left / right
        elif left == right:
            dimension = left
        else:
            raise UnitMismatch(f"'{self.left} {self.kind} {self.right}'", left, right)
        object.__setattr__(self, "dimension", dimension)

    def evaluate(self, env: Mapping[str, int]) -> int:
        return _INTEGER[self.kind](self.left.evaluate(env), self.right.evaluate(env))

    def source(self) -> str:
        left, right = self.left.source(), self.right.source()
        if self.kind == "cdiv":
            return f"(-(-{left} // {right}))"
        if self.kind in ("min", "max"):
            return f"{self.kind}({left}, {right})"
        return f"({left} {self.kind} {right})"

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        import z3

        left, right = self.left.to_z3(env, side), self.right.to_z3(env, side)
        if self.kind == "cdiv":
            if (known := env.get(str(self))) is not None:
                return known
            # A fresh quotient pinned by two products: z3 decides these, its own division by a symbol often ends in `unknown`.
            quotient = z3.FreshInt("q")
            side += [right >= 1, quotient * right >= left, (quotient - 1) * right < left]
            return quotient
        if self.kind == "min":
            return z3.If(left <= right, left, right)
        if self.kind == "max":
            return z3.If(left >= right, left, right)
        return left + right if self.kind == "+" else left - right if self.kind == "-" else left * right

    def text(self, outer: int = 0) -> str:
        if self.kind == "cdiv":
            return f"ceil({self.left.text(2)} / {self.right.text(3)})"
        if self.kind in ("min", "max"):
            return f"{self.kind}({self.left.text()}, {self.right.text()})"
        level = _PRECEDENCE[self.kind]
        # a - (b + c) needs its parentheses, a + (b + c) does not
        shown = f"{self.left.text(level)} {_SIGN[self.kind]} {self.right.text(level + (self.kind == '-'))}"
        return f"({shown})" if level < outer else shown

    def symbols(self) -> Iterator[Sym]:
        yield from self.left.symbols()
        yield from self.right.symbols()

    __str__ = Expr.__str__


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
    "cdiv": int_ceil_div,
}


@dataclass(frozen=True, slots=True)
class ByReference(Expr):
    """The same number, counted by reference: a page listed by n rows counts n times. The only conversion between units."""

    inner: Expr
    dimension: Dimension = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", self.inner.dimension.by_reference())

    def evaluate(self, env: Mapping[str, int]) -> int:
        return self.inner.evaluate(env)

    def source(self) -> str:
        return self.inner.source()

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        return self.inner.to_z3(env, side)

    def text(self, outer: int = 0) -> str:
        return self.inner.text(outer)

    def symbols(self) -> Iterator[Sym]:
        return self.inner.symbols()

    __str__ = Expr.__str__


@dataclass(frozen=True, slots=True)
class Relation:
    """`left kind right` with kind one of <=, <, ==; both sides have the same dimension."""

    kind: str
    left: Expr
    right: Expr

    def __post_init__(self) -> None:
        if self.left.dimension != self.right.dimension:
            raise UnitMismatch(f"'{self}'", self.left.dimension, self.right.dimension)

    def evaluate(self, env: Mapping[str, int]) -> bool:
        left, right = self.left.evaluate(env), self.right.evaluate(env)
        return left <= right if self.kind == "<=" else left < right if self.kind == "<" else left == right

    def source(self) -> str:
        return f"{self.left.source()} {self.kind} {self.right.source()}"

    def to_z3(self, env: Mapping[str, Any], side: list[Any]) -> Any:
        left, right = self.left.to_z3(env, side), self.right.to_z3(env, side)
        return left <= right if self.kind == "<=" else left < right if self.kind == "<" else left == right

    def symbols(self) -> Iterator[Sym]:
        yield from self.left.symbols()
        yield from self.right.symbols()

    def __str__(self) -> str:
        return f"{self.left} {self.kind} {self.right}"


def lift(value: Expr | int) -> Expr:
    """An integer as a dimensionless constant; an expression as it is."""
    return value if isinstance(value, Expr) else Const(value)


def ceil_div(left: Expr, right: Expr) -> Expr:
    """ceil(left / right), right > 0; the dimension is the quotient's."""
    return Binary("cdiv", left, right)


def minimum(left: Expr, right: Expr) -> Expr:
    """The smaller of two quantities of one unit."""
    return Binary("min", left, right)


def maximum(left: Expr, right: Expr) -> Expr:
    """The larger of two quantities of one unit."""
    return Binary("max", left, right)


def by_reference(expr: Expr) -> Expr:
    """Pages as page references."""
    return ByReference(expr)


def compile_check(relations: Sequence[Relation], arguments: Sequence[str], constants: Mapping[str, int]) -> Callable[[Sequence[int]], int]:
    """One function of `arguments` (a sequence of integers in that order) that gives the index of the first relation that fails, or -1.

    `constants` are written in as numbers. The production reading: it costs about 0.1 us a relation, a walk of the trees thirty times that.
    """
    lines = ["def check(facts):", f"    ({', '.join(arguments)},) = facts"]
    seen: set[str] = set()
    for i, relation in enumerate(relations):
        source = relation.source()
        if source not in seen:  # many buffers have one demand and one capacity: the first of them tells for all
            seen.add(source)
            lines.append(f"    if not {source}: return {i}")
    lines.append("    return -1")
    scope: dict[str, Any] = {}
    # Names that are constants become defaults of the namespace; the relations come from our own trees, never from input.
    scope.update(constants)
    exec(compile("\n".join(lines), "<bounds>", "exec"), scope)
    check: Callable[[Sequence[int]], int] = scope["check"]
    return check
