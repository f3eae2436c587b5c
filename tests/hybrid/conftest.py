"""One thread: models this small gain nothing from more, and on a busy machine threads only wait. And the transformers that these tests know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

# Before it, files of text models have other names and 16-bit roundings are others; in float64 and float32 5.5.0 agrees too (tried by hand).
OLDEST = (5, 24)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        pytest.skip(f"transformers {transformers.__version__} is older than {'.'.join(map(str, OLDEST))}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
