"""Checkpoints that several tests read, and one thread: models this small gain nothing from more, and on a busy machine threads only wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from . import tiny


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("untied"), tiny.VARIANTS["untied"])


@pytest.fixture(scope="package")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("windowed"), tiny.VARIANTS["window_by_layer_types"])
