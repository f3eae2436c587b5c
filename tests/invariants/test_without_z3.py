"""Proofs without z3: one line that says what to install, and no traceback."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from twinfer.invariants import prove


def test_it_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "z3":
            raise ImportError("No module named 'z3'")
        return right(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert prove.main() == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "error: proofs need z3-solver; install it with: pip install 'twinfer[prove]'\n")
