"""Each operation's large cases, by form: the Triton kernel, plain PyTorch, and for a product cuBLAS. On a GPU only. No time is asserted.

A form is timed once the kernel has passed the operation's own tolerance on that case. A round is LAUNCHES calls and one wait for the device, launching
included: what is small is bound by the host here, which a captured graph is not.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

from twinfer.bench.conftest import DEVICE, synchronised
from twinfer.bench.gate import check_operation
from twinfer.bench.record import device_slug

if DEVICE == "cpu":
    pytest.skip("the interpreter's times say nothing: TEST_DEVICE=cuda", allow_module_level=True)

from twinfer.kernels.operation import Case, Example, Operation
from twinfer.kernels.operations import OPERATIONS

LAUNCHES = 10
FORMS = ("triton", "plain", "cublas")
BY_ROW = ("attention", "gdn_inputs", "write_histories", "sample", "logprobs")  # whose plain forms go row by row or token by token


def cases() -> list[Any]:
    found = []
    for operation in OPERATIONS:
        for number, case in enumerate(operation.large):
            forms = FORMS if operation.name == "matmul" and not (case.get("bias") or case.get("wide")) else FORMS[:2]
            found += [pytest.param(operation, case, form, id=f"{form}-{operation.name}-{number}") for form in forms]
    return found


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """cuBLAS."""
    torch.mm(x, weight.t(), out=out)


@pytest.mark.parametrize(("operation", "case", "form"), cases())
def test_operation(benchmark: Any, operation: Operation, case: Case, form: str) -> None:
    shape = " ".join(f"{name}={value}" for name, value in case.items())
    benchmark.group = f"{operation.name} {shape}"
    dtype = torch.bfloat16 if "bfloat16" in operation.tolerance else torch.float32
    seed = zlib.crc32(benchmark.group.encode())
    example: Example = operation.make(case, dtype, torch.Generator(DEVICE).manual_seed(seed))
    error = check_operation(operation, example, dtype)
    call = {"triton": operation.triton, "plain": operation.plain, "cublas": multiply}[form]
    launches = 1 if form == "plain" and operation.name in BY_ROW else LAUNCHES
    name = str(dtype).removeprefix("torch.")
    benchmark.extra_info.update(model="operations", device=device_slug(DEVICE), dtype=name, launches=launches, error=error)

    def run() -> None:
        for _ in range(launches):
            call(**example.tensors, **example.constants)
        synchronised()

    benchmark.pedantic(run, rounds=3 if launches == 1 else 20, warmup_rounds=1 if launches == 1 else 3)
