"""The interpreter's tl.dot with its sum in a fixed order, for tests of bits. Not a kernel and not a fixture: a test says when it holds."""

from __future__ import annotations

import os
from typing import Any

import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, tl.dot adds its products in ascending order. The interpreter calls BLAS, where a row's bits depend on how many rows there are:
    16 and 64 differ in nine of ten elements. A GPU's matrix units keep the order (bench/probes/RESULTS.md) and are left alone."""
    if os.environ.get("TEST_DEVICE", "cpu") != "cpu":
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> TensorHandle:
        x, y, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data
        for i in range(x.shape[-1]):
            total = total + x[..., i, None] * y[..., i, None, :]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
