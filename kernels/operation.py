"""Operation: one operation of the fast engine as a value that carries both forms. It launches nothing of itself and chooses no tile.

Both forms have one signature, take every tensor that they need as an argument and write their results in place: a forward allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of one call.

    tensors    every tensor argument by its parameter name; those that are only written hold NaN (or the lowest integer)
    constants  every other argument
    outputs    names of the tensors that the call writes as results
    workspace  names of the tensors that it may write to besides, whatever they hold afterwards; all others must come out as they went in
    """

    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("out",)
    workspace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CompileJob:
    """One form in which serving compiles a kernel, for the compile gate.

    function   the jit function
    types      Triton's type of each run-time argument; every pointer is a multiple of 16 bytes
    constants  compile-time arguments
    aligned    integer arguments that serving passes as multiples of 16
    options    what else its launches tell the compiler
    claims     what the table rests on: "mma" (dots run on a matrix unit), "wgmma" (on Hopper's, whose operands stay in shared memory), "async" (loads
               run ahead, so that the stages are real), "tma" (through tensor descriptors)
    shared     bytes of shared memory that the table reckons with, None where it has no such bound
    """

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    claims: frozenset[str] = frozenset()
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """name, the two forms, and what a test of both needs.

    plain      PyTorch, for reading; also runs on float64 tensors
    triton     the same call by a Triton kernel
    make       (case, dtype, generator) -> Example on the generator's device; unread places are NaN
    cases      small enough for Triton's interpreter, together they touch every branch
    large      cases for a GPU only
    tolerance  dtype name -> largest |triton - plain in float64| / largest |plain in float64| of any output; the error of `plain` in that dtype
               is the floor beside which it was set. 0: equal to the bit (to plain in the same dtype)
    """

    name: str
    plain: Callable[..., None]
    triton: Callable[..., None]
    make: Callable[[Case, torch.dtype, torch.Generator], Example]
    cases: tuple[Case, ...]
    tolerance: Mapping[str, float]
    large: tuple[Case, ...] = ()
