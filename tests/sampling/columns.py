"""Sampling columns with everything off, for the sampling tests; not a model and not a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twinfer.plan import SamplingColumns


def _csr(rows: Sequence[Mapping[int, float]]) -> tuple[Any, Any, Any]:
    """indptr int32, ids int32 and values of one mapping of token id to value a row."""
    indptr = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
    return indptr, np.array([i for row in rows for i in row], np.int32), np.array([v for row in rows for v in row.values()])


def make_columns(
    num_rows: int = 1, bias: Sequence[Mapping[int, float]] = (), seen: Sequence[Mapping[int, int]] = (), **values: Any
) -> SamplingColumns:
    """`values` are columns by name: one value for all rows or one a row; bias and seen are a mapping a row."""
    defaults = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition": (1.0, np.float32),
        "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32),
        "seed": (0, np.uint64),
        "sample": (0, np.int32),
        "num_logprobs": (-1, np.int32),
    }
    columns = {name: np.zeros(num_rows, dtype) for name, (_, dtype) in defaults.items()}
    for name, (value, _) in defaults.items():
        columns[name][:] = values.pop(name, value)
    assert not values, f"no such columns: {sorted(values)}"
    bias_indptr, bias_ids, bias_values = _csr(bias or [{}] * num_rows)
    seen_indptr, seen_ids, seen_counts = _csr(seen or [{}] * num_rows)
    return SamplingColumns(
        **columns,
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=bias_values.astype(np.float32),
        seen_indptr=seen_indptr,
        seen_ids=seen_ids,
        seen_counts=seen_counts.astype(np.int32),
    )
