"""OPERATIONS: every operation of the fast engine, for tests, the compile gate and benchmarks. The engine imports the launchers themselves."""

from __future__ import annotations

from twinfer.kernels.embedding.operation import EMBEDDING
from twinfer.kernels.operation import Operation

OPERATIONS: tuple[Operation, ...] = (EMBEDDING,)
