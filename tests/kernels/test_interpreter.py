"""The one pair of versions that Triton's interpreter does not work with is told by name."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import refuse_what_cannot_run


def test_the_pair_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(pytest.UsageError, match=r"numpy<2\.4"):
        refuse_what_cannot_run("3.6.0", "2.4.6")
    for fine in (("3.7.1", "2.4.6"), ("3.6.0", "2.3.5")):
        refuse_what_cannot_run(*fine)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refuse_what_cannot_run("3.6.0", "2.4.6")
