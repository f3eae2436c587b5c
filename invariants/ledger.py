"""Ledger: the only way to get a buffer that outlives a step. It reads the size from the bound of that name and writes down who got what.

Nobody can pass a size: to change a buffer, change a limit. It keeps no buffer alive; torch lives in the executor's `make`, not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinfer.config import ModelConfig
from twinfer.errors import LimitError, TwinferError
from twinfer.invariants.bound import ITEM_SIZE, Bound, concrete_dtype
from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.size import format_bytes
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.limits import Limits

MOST_BYTES = 2**47  # 128 TiB, the user address space of x86-64: a larger buffer is a mistake in a limit
_Buffer = TypeVar("_Buffer")


class UnknownBound(TwinferError, KeyError):
    """A buffer was asked for under a name that no bound has."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no bound is named {name!r}: state it in invariants/bounds.py first")

    def __str__(self) -> str:
        return str(self.args[0])


class LedgerError(TwinferError):
    """A buffer was asked for twice by one owner, or made with another size or dtype than its bound's."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One buffer handed out: bytes of this copy; `copy` counts from 0."""

    name: str
    owner: str
    copy: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Ledger:
    """Sizes come from `limits` and the model's shape; `dtype` is the one that the engine runs in. `model` None: buffers of host integers only."""

    def __init__(self, limits: Limits, model: ModelConfig | None, dtype: str, bounds: dict[str, Bound] = BY_NAME) -> None:
        """Raises LimitError where a limit makes a row-pointer array point beyond its dtype, before anything is allocated."""
        self.limits, self.model, self.dtype, self._bounds = limits, model, dtype, bounds
        self._env = {**limit_env(limits, model), **model_env(model)}
        self._rows: dict[tuple[str, str, int], LedgerRow] = {}
        for bound in bounds.values():
            if bound.indexes and self.capacity(bound.indexes) >= 2**31:
                raise LimitError(
                    f"{bound.indexes} may hold {self.capacity(bound.indexes)} entries ({bounds[bound.indexes].capacity}), "
                    f"{bound.name} counts them in int32, below 2^31: lower max_batch or max_step_context"
                )

    def capacity(self, name: str) -> int:
        """Entries of the counted axis. Raises UnknownBound."""
        return self._bound(name).capacity.evaluate(self._env)

    def bytes_of(self, name: str) -> int:
        """Bytes of one copy. Raises UnknownBound."""
        bound = self._bound(name)
        return math.prod(bound.axes(self._env)) * ITEM_SIZE[concrete_dtype(bound.dtype, self.dtype)]

    def copies(self, name: str) -> int:
        """Copies that an owner may take: look_ahead + 1 of what the host fills while a step may be in flight, else 1. Raises UnknownBound."""
        return self._bound(name).copies(self._env)

    def host(self, name: str, *, owner: str = "engine", copy: int = 0) -> NDArray[Any]:
        """A zeroed numpy array of the bound's shape and dtype.

        Raises UnknownBound; LedgerError when `owner` has that copy already, `copy` is not below `copies(name)` or numpy lacks the dtype; LimitError
        for a size that no machine has.
        """

        def make(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
            if dtype == "bfloat16":
                raise LedgerError(f"{name}: numpy has no bfloat16; use allocate with the executor's own allocator")
            return np.zeros(shape, dtype)

        return self.allocate(name, make, owner=owner, copy=copy)

    def allocate(self, name: str, make: Callable[[tuple[int, ...], str], _Buffer], *, owner: str = "fast", copy: int = 0) -> _Buffer:
        """What `make(shape, dtype name)` gives, recorded. Raises as `host` does, and LedgerError when its shape is not the one asked for."""
        bound = self._bound(name)
        if not bound.dtype:
            raise LedgerError(f"{name} limits plans and sizes no buffer")
        key = (name, owner, copy)
        if key in self._rows:
            raise LedgerError(f"{owner} has {name} (copy {copy}) already; a second one would be outside every bound")
        if not 0 <= copy < self.copies(name):
            raise LedgerError(f"{name}: copy {copy} of {self.copies(name)}; there is one copy for each step that may be in flight")
        try:
            shape = bound.axes(self._env)
        except KeyError as missing:
            raise LedgerError(f"{name} is sized by {missing.args[0]}, which a ledger without a model does not know") from None
        dtype = concrete_dtype(bound.dtype, self.dtype)
        size = math.prod(shape) * ITEM_SIZE[dtype]
        if size > MOST_BYTES:
            raise LimitError(
                f"{name} {list(shape)} {dtype} would take {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}: "
                f"lower a limit in {bound.bytes_expr(self.dtype)}"
            )
        buffer = make(shape, dtype)
        made = getattr(buffer, "shape", None)
        if made is not None and tuple(made) != shape:
            raise LedgerError(f"{name}: {owner} made {list(made)}, the bound says {list(shape)}; change a limit, not the buffer")
        made_dtype = str(getattr(buffer, "dtype", dtype)).removeprefix("torch.")
        if made_dtype != dtype:
            raise LedgerError(f"{name}: {owner} made {made_dtype}, the bound says {dtype}")
        self._rows[key] = LedgerRow(name, owner, copy, shape, dtype, size)
        return buffer

    def rows(self) -> tuple[LedgerRow, ...]:
        """Every buffer handed out so far, in that order."""
        return tuple(self._rows.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of every buffer handed out so far."""
        return sum(row.bytes for row in self._rows.values())

    def _bound(self, name: str) -> Bound:
        try:
            return self._bounds[name]
        except KeyError:
            raise UnknownBound(name) from None
