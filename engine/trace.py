"""Trace: the plans of a run, to be logged, replayed on another executor and shrunk. Plans start from an empty cache and an empty page table."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from twinfer.executor import Executor
from twinfer.limits import Limits
from twinfer.output import StepOutput
from twinfer.plan import SamplingColumns, StepPlan
from twinfer.table import TableDelta

_FORMAT = 3


@dataclass(slots=True)
class Trace:
    """`limits` and every launched plan, in order. `record` appends; `replay` runs them on any executor made for the same limits.

    max_plans    plans kept at most; later ones are counted in `num_dropped`, and a trace that has dropped one is neither replayed nor saved
    """

    limits: Limits
    plans: list[StepPlan] = field(default_factory=list)
    max_plans: int = 100_000
    num_dropped: int = 0

    def record(self, plan: StepPlan) -> None:
        """Adds a launched plan (plans are values: nothing is copied)."""
        if len(self.plans) < self.max_plans:
            self.plans.append(plan)
        else:
            self.num_dropped += 1

    def _whole(self) -> list[StepPlan]:
        if self.num_dropped:
            raise ValueError(f"the trace keeps max_plans = {self.max_plans} plans and has dropped {self.num_dropped}: it can't be replayed")
        return self.plans

    def replay(self, executor: Executor) -> list[StepOutput]:
        """Outputs of all plans on `executor`, which must be fresh. Raises what the executor raises."""
        outputs = []
        for plan in self._whole():
            executor.launch(plan)
            outputs.append(executor.collect())
        return outputs

    def save(self, path: str | Path) -> None:
        """Writes one .npz file: limits as JSON, columns as arrays."""
        arrays: dict[str, Any] = {}
        for i, plan in enumerate(self._whole()):
            _flatten_into(arrays, f"{i}", plan)
        header = json.dumps({"format": _FORMAT, "limits": asdict(self.limits), "num_plans": len(self.plans)})
        arrays["header"] = np.frombuffer(header.encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        Path(path).write_bytes(buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what `save` wrote. Raises ValueError naming the file when it is something else."""
        try:
            with np.load(Path(path), allow_pickle=False) as data:
                header = json.loads(bytes(data["header"]))
                if header["format"] != _FORMAT:
                    raise ValueError(f"trace format {header['format']}, this reads {_FORMAT}")
                limits = header["limits"]
                limits["buckets"] = tuple(limits["buckets"])
                return cls(Limits(**limits), [_plan_from(data, f"{i}") for i in range(header["num_plans"])])
        except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a trace ({error})") from None


_NESTED = {"delta": TableDelta, "sampling": SamplingColumns}


def _flatten_into(arrays: dict[str, Any], prefix: str, value: Any) -> None:
    for item in fields(value):
        part = getattr(value, item.name)
        if item.name in _NESTED:
            _flatten_into(arrays, f"{prefix}.{item.name}", part)
        elif part is not None:
            arrays[f"{prefix}.{item.name}"] = np.asarray(part)


def _plan_from(data: Any, prefix: str) -> StepPlan:
    return StepPlan(**_read(data, prefix, StepPlan))


def _read(data: Any, prefix: str, kind: type) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in fields(kind):
        key = f"{prefix}.{item.name}"
        if item.name in _NESTED:
            nested = _NESTED[item.name]
            values[item.name] = nested(**_read(data, key, nested))
        elif key in data:
            array = data[key]
            values[item.name] = array.item() if array.ndim == 0 else array
    return values
