"""Every operation: its Triton form against its plain form, on guarded tensors. TEST_DEVICE=cuda runs compiled kernels, large cases and bf16."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

from tests.kernels.guard import Guarded, same_bits
from twinfer.kernels.operation import Case, Example, Operation
from twinfer.kernels.operations import OPERATIONS

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
# The interpreter computes in numpy, which has no bfloat16.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def all_cases() -> list[tuple[Operation, Case, torch.dtype]]:
    found = []
    for operation in OPERATIONS:
        for case in (*operation.cases, *(operation.large if DEVICE == "cuda" else ())):
            found += [(operation, case, dtype) for dtype in DTYPES if dtype_name(dtype) in operation.tolerance]
    return found


def label(value: object) -> str:
    if isinstance(value, Operation):
        return value.name
    return dtype_name(value) if isinstance(value, torch.dtype) else "-".join(f"{k}{v}" for k, v in value.items())  # type: ignore[attr-defined]


def example_of(operation: Operation, case: Case, dtype: torch.dtype) -> Example:
    seed = zlib.crc32(f"{operation.name} {label(case)}".encode())
    return operation.make(case, dtype, torch.Generator(DEVICE).manual_seed(seed))


def plain_outputs(operation: Operation, example: Example, wide: bool) -> dict[str, torch.Tensor]:
    """Outputs of the plain form, computed on float64 copies where `wide`."""
    tensors = {n: t.to(torch.float64 if wide and t.dtype.is_floating_point else t.dtype, copy=True) for n, t in example.tensors.items()}
    operation.plain(**tensors, **example.constants)
    return {name: tensors[name] for name in example.outputs}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value, where `want` is a number; infinite where `got` is none or NaNs don't match."""
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    got, want = got.double().nan_to_num(0.0), want.double().nan_to_num(0.0)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)) if want.numel() else 0.0


@pytest.mark.parametrize(("operation", "case", "dtype"), all_cases(), ids=label)
def test_triton_form_equals_plain_form(operation: Operation, case: Case, dtype: torch.dtype) -> None:
    example = example_of(operation, case, dtype)
    tolerance = operation.tolerance[dtype_name(dtype)]
    guarded = {name: Guarded(tensor) for name, tensor in example.tensors.items()}
    operation.triton(**{name: g.tensor for name, g in guarded.items()}, **example.constants)
    want = plain_outputs(operation, example, wide=tolerance > 0)
    floor = plain_outputs(operation, example, wide=False)
    for name, g in guarded.items():
        assert g.intact(), f"{name}: written outside the tensor"
        if name in example.workspace:
            continue
        if name not in example.outputs:
            assert same_bits(g.tensor, example.tensors[name]), f"{name} is an input and was written"
        elif tolerance == 0 or not g.tensor.dtype.is_floating_point:
            assert same_bits(g.tensor, floor[name]), f"{name} differs: {(g.tensor != floor[name]).sum()} elements"
        else:
            error, own = relative_error(g.tensor, want[name]), relative_error(floor[name], want[name])
            assert own <= tolerance, f"{name}: the plain form itself is {own:.2e} from float64, tolerance {tolerance:.2e}"
            assert error <= tolerance, f"{name}: {error:.2e} from float64, tolerance {tolerance:.2e}, the plain form {own:.2e}"


def test_every_operation_has_cases() -> None:
    assert {o.name for o, _, _ in all_cases()} == {o.name for o in OPERATIONS}
