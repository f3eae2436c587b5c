"""BoundLine: one bound as people read it, in words and, for a model and limits, in numbers. Markdown is `report`'s, tables are the command line's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BUFFERS, CONTRACT
from twinfer.invariants.memory import GROUPS, OTHER, counted_bytes

CONTRACT_GROUP = "the scheduler's contract"
NO_BUFFER = "limits of plans that size no buffer of their own"


@dataclass(frozen=True, slots=True)
class Numbers:
    """A bound's figures for one model and its limits, as the memory plan counts them.

    capacity  entries of the counted axis, in the bound's unit
    elements  of one copy; 0 where the bound sizes no buffer of this engine
    copies    that the budget pays for: on its device the fast engine keeps one, the reference one for each step in flight
    bytes     of these copies
    """

    capacity: int
    axes: tuple[int, ...]
    elements: int
    copies: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BoundLine:
    """One line. `shape` has the axis n where the capacity stands; `shape`, `dtype` and `held` are "" for a bound that sizes no buffer.

    group  as in the memory plan
    held   who holds the buffer
    """

    name: str
    group: str
    unit: str
    demand: str
    capacity: str
    shape: str
    dtype: str
    held: str
    why: str
    history: str
    numbers: Numbers | None


def bound_lines(env: Mapping[str, int] | None = None, dtype: str = "", backend: str = "fast") -> list[BoundLine]:
    """Every bound in the order in which they are stated, the scheduler's contract first.

    env    values of limits and shape (`symbols.limit_env`, `model_env`); None: formulas only
    dtype  of the model, backend: the engine; for the figures
    """
    of = {name: title for title, names in GROUPS for name in names}
    groups = [(CONTRACT_GROUP, bound) for bound in CONTRACT]
    groups += [(of.get(bound.name, OTHER if bound.dtype else NO_BUFFER), bound) for bound in BUFFERS]
    return [_line(group, bound, env, dtype, backend) for group, bound in groups]


def by_group(lines: Iterable[BoundLine]) -> list[tuple[str, list[BoundLine]]]:
    """The contract, the memory plan's groups in its order, and one more for what sizes no buffer; every line is in exactly one."""
    held: dict[str, list[BoundLine]] = {title: [] for title in (CONTRACT_GROUP, *(title for title, _ in GROUPS), OTHER, NO_BUFFER)}
    for line in lines:
        held[line.group].append(line)
    return list(held.items())


def shared_reasons(lines: Iterable[BoundLine]) -> list[tuple[list[str], str, str]]:
    """(names, why, history): one entry a reason, with the bounds that share it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        shared.setdefault((line.why, line.history), []).append(line.name)
    return [(names, why, history) for (why, history), names in shared.items()]


def _line(group: str, bound: Bound, env: Mapping[str, int] | None, dtype: str, backend: str) -> BoundLine:
    shape = " x ".join("n" if axis == bound.capacity else f"({axis})" if " " in str(axis) else str(axis) for axis in bound.shape)
    held = ", ".join(bound.owners) + (", on the host one for each step in flight" if bound.staged else "")
    sized = bool(bound.dtype)
    return BoundLine(
        bound.name, group, str(bound.unit), str(bound.demand), str(bound.capacity), shape if sized else "", bound.dtype, held if sized else "", bound.why,
        bound.history, None if env is None else _numbers(bound, env, dtype, backend),
    )  # fmt: skip


def _numbers(bound: Bound, env: Mapping[str, int], dtype: str, backend: str) -> Numbers:
    size = counted_bytes(bound, env, dtype, backend)
    axes = bound.axes(env) if size else ()
    copies = 0 if not size else 1 if backend == "fast" else bound.num_copies(env, backend)
    return Numbers(bound.capacity.evaluate(env), axes, math.prod(axes) if size else 0, copies, size)

