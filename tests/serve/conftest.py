"""One thread for torch: the models are so small that threads only wait for one another. The setting is put back afterwards. And kernels come first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# A kernel is compiled or interpreted as TRITON_INTERPRET says when it is imported. Tests here take the variable away, to see what a command then says:
# the kernels must be there before, as tests/__init__.py wants them.
import twinfer.fast.executor  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TWINFER_* variable of whoever runs the tests reaches a command; help is laid out wide enough for every option."""
    import os

    for name in list(os.environ):
        if name.startswith("TWINFER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "160")
