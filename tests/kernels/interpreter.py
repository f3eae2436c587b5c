"""Whether Triton's interpreter works with the numpy that is installed. Not whether a kernel does."""

from __future__ import annotations

import os

import numpy as np
import pytest
import triton


def version(text: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def refuse_what_cannot_run(triton_version: str = triton.__version__, numpy_version: str = np.__version__) -> None:
    """Triton 3.6 makes Python numbers of arrays with one dimension, which numpy refuses from 2.4 on: every kernel fails there, and each test would say so
    in other words. Package metadata can't express the pair. Raises pytest.UsageError that says what to install."""
    interpreting = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if interpreting and version(triton_version) < (3, 7) and version(numpy_version) >= (2, 4):
        raise pytest.UsageError(
            f"the interpreter of triton {triton_version} does not work with numpy {numpy_version}: pip install 'numpy<2.4', or triton>=3.7; "
            "kernels that a GPU runs are not concerned"
        )
