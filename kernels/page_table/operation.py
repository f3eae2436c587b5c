"""The operation that updates the page table: both forms, its inputs, and the kernel that serving compiles."""

from __future__ import annotations

import torch

from twinfer.kernels.operation import Case, CompileJob, Example, Operation
from twinfer.kernels.page_table import kernel, plain


def make(case: Case, dtype: torch.dtype, generator: torch.Generator) -> Example:
    """case: n changes of a table of `slots` rows and `width` columns."""
    slots, width, device = case["slots"], case["width"], generator.device
    places = torch.randperm(slots * width, generator=generator, device=device)[: case["n"]]
    tensors = {
        "slots": (places // width).to(torch.int32),
        "indices": (places % width).to(torch.int32),
        "pages": torch.randint(1, 2**31 - 1, (case["n"],), generator=generator, device=device, dtype=torch.int32),
        "table": torch.randint(0, 2**31 - 1, (slots, width), generator=generator, device=device, dtype=torch.int32),
    }
    return Example(tensors, outputs=("table",))


UPDATE_PAGE_TABLE = Operation(
    name="update_page_table",
    plain=plain.update_page_table,
    triton=kernel.update_page_table,
    make=make,
    cases=({"n": 1, "slots": 1, "width": 1}, {"n": 300, "slots": 5, "width": 70}, {"n": 256, "slots": 3, "width": 129}),
    large=({"n": 100_000, "slots": 256, "width": 16384},),
    tolerance={"float32": 0.0},
)


def compile_jobs(capability: tuple[int, int] = (9, 0)) -> list[CompileJob]:
    """One, the same on every device."""
    pointers = dict.fromkeys(("SLOTS", "INDICES", "PAGES", "TABLE"), "*i32")
    return [CompileJob(kernel.update_page_table_kernel, {**pointers, "n": "i32", "width": "i32"}, {"BLOCK": kernel.BLOCK}, 4, 3)]
