"""Says once, before any kernel runs, that the interpreter can't work here; one thread, as models this small gain nothing from more."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.interpreter import refuse_what_cannot_run

refuse_what_cannot_run()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
