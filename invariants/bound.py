"""Bound: what one buffer may hold, stated once. Allocation, run-time check, memory plan, proof and docs are readings of it. It allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from twinfer.invariants.expr import Const, Expr, Relation
from twinfer.invariants.unit import BYTES, Dimension, UnitMismatch

EXECUTORS = ("reference", "fast")
MODEL_DTYPE = "model"  # the dtype that the engine was loaded with
WIDE_DTYPE = "wide"  # of what must not be rounded to it: float64 for float64, else float32

ITEM_SIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "uint64": 8,
    "int32": 4,
    "uint32": 4,
    "bool": 1,
}


def concrete_dtype(dtype: str, model_dtype: str) -> str:
    """`dtype` with the symbolic ones resolved. Raises ValueError for one that no engine has."""
    if dtype == MODEL_DTYPE:
        dtype = model_dtype
    elif dtype == WIDE_DTYPE:
        dtype = "float64" if model_dtype == "float64" else "float32"
    if dtype not in ITEM_SIZE:
        raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(ITEM_SIZE)}")
    return dtype


@dataclass(frozen=True, slots=True)
class Bound:
    """A capacity, the demand that must stay within it, and the buffer sized by it.

    name      of the bound and of its buffer
    unit      what is counted; capacity and demand must have it, else UnitMismatch
    dtype     of the buffer: a name of ITEM_SIZE, "model" or "wide"; "" where the bound limits plans but sizes no buffer
    capacity  a formula of Limits and the model's shape
    demand    a formula of a plan's facts (and Limits)
    why       one sentence: what goes wrong with another size
    history   where it was once wrong ("" if we know of no case)
    shape     axes of the buffer, one of them `capacity` itself; () stands for (capacity,)
    owners    who holds one: "engine" and executors by their names in EXECUTORS (an engine runs over one of them)
    staged    the host fills it while a step may be in flight: one copy for each such step
    assumed   part of the scheduler's contract: proofs assume it, so the auditor checks it before everything else
    host_only the fast executor keeps it on the host alone
    indexes   for a row-pointer array, the bound whose entries it points into (they must fit its dtype)
    """

    name: str
    unit: Dimension
    dtype: str
    capacity: Expr
    demand: Expr
    why: str
    history: str = ""
    shape: tuple[Expr, ...] = ()
    owners: tuple[str, ...] = ("fast",)
    staged: bool = False
    assumed: bool = False
    indexes: str = ""
    host_only: bool = False

    def __post_init__(self) -> None:
        for side, expr in (("capacity", self.capacity), ("demand", self.demand)):
            if expr.dimension != self.unit:
                raise UnitMismatch(f"bound {self.name!r}: {side} '{expr}'", self.unit, expr.dimension)
        if not self.shape:
            object.__setattr__(self, "shape", (self.capacity,))
        if self.capacity not in self.shape:
            raise ValueError(f"bound {self.name!r}: no axis of its shape is the capacity {self.capacity}")

    @property
    def relation(self) -> Relation:
        """demand <= capacity."""
        return self.demand <= self.capacity

    @property
    def remedy(self) -> str:
        """What to change when the demand is too large: derived from the capacity's formula, so that it can't go stale."""
        names = list(dict.fromkeys("max_batch" if s.name == "max_bucket" else s.name for s in self.capacity.symbols()))
        names = [name for name in names if name != "page_size"]
        return f"raise {' or '.join(names)}, or plan fewer {self.unit}"

    def bytes_expr(self, model_dtype: str) -> Expr:
        """Bytes of one copy: the product of the axes times the size of an item (in bytes per whatever an item stands for)."""
        items = reduce(lambda a, b: a * b, self.shape)
        return items * Const(ITEM_SIZE[concrete_dtype(self.dtype, model_dtype)], BYTES / items.dimension)

    def axes(self, env: Mapping[str, int]) -> tuple[int, ...]:
        """The buffer's shape in numbers."""
        return tuple(axis.evaluate(env) for axis in self.shape)

    def copies(self, env: Mapping[str, int]) -> int:
        """Copies that one owner holds: one for each step that may be in flight, or one."""
        return env["look_ahead"] + 1 if self.staged else 1

    def num_copies(self, env: Mapping[str, int], backend: str) -> int:
        """Copies that exist when the engine runs over `backend`, on the host and on the device together."""
        own = 0
        if backend in self.owners:
            own = self.copies(env) if self.staged or backend == "reference" or self.host_only else 0  # on the host
            own += backend == "fast" and not self.host_only
        return own + self.copies(env) * ("engine" in self.owners)

    def device_bytes(self, env: Mapping[str, int], model_dtype: str) -> int:
        """Bytes that the fast executor keeps on its device."""
        if not self.dtype or "fast" not in self.owners or self.host_only:
            return 0
        return math.prod(self.axes(env)) * ITEM_SIZE[concrete_dtype(self.dtype, model_dtype)]

    def total_bytes(self, env: Mapping[str, int], model_dtype: str, backend: str) -> int:
        """Bytes of all copies of the engine and of `backend`; 0 where the bound sizes no buffer."""
        if not self.dtype:
            return 0
        item = ITEM_SIZE[concrete_dtype(self.dtype, model_dtype)]
        return math.prod(self.axes(env)) * item * self.num_copies(env, backend)
