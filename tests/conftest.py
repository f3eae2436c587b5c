"""For all tests: one thread of torch, and a soak profile of hypothesis. `--hypothesis-profile=soak` runs each property as often as tests/budget.py says.

One thread: tests run side by side (-n auto), and threads of OpenMP that wait for each other on busy cores took most of their time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("soak", deadline=None, database=None, print_blob=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
