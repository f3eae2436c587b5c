"""Runs `twinfer` commands inside the test process and takes down what they print. Also knows enough of a shell to run the printed examples."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from twinfer.fast import device
from twinfer.serve.cli import main

INTERPRET = "TRITON_INTERPRET=1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line that says why a command failed. Fails when there is none, several, or a traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        return lines[0]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(*arguments: str, stdin: str | bytes | None = None, typed: str | None = None) -> Outcome:
    """One command. `stdin` is piped in, `typed` comes from a terminal; with neither, standard input is the null device."""
    with contextlib.ExitStack() as stack:
        source: io.TextIOBase
        if typed is not None:
            source = Terminal(typed)
        elif stdin is not None:
            source = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), encoding="utf-8")
        else:
            source = stack.enter_context(open(os.devnull, encoding="utf-8"))
        before, sys.stdin = sys.stdin, source  # type: ignore[assignment]
        stack.callback(setattr, sys, "stdin", before)
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        code: object = 0
        try:
            main(arguments)
        except SystemExit as ending:
            code = ending.code or 0
    assert isinstance(code, int), code
    return Outcome(code, out.getvalue(), err.getvalue())


def interpret(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """Commands are told that Triton's interpreter is on or off, whatever the kernels of this process were defined with."""
    monkeypatch.setattr(device, "interpreting", lambda: on)


def run_line(line: str) -> Outcome:
    """A line of a shell: `twinfer ...`, or `echo ... | twinfer ...`, `printf ... | twinfer ...`. Anything else is a ValueError.

    Triton's interpreter is on only where the line says TRITON_INTERPRET=1, whatever the tests themselves run with.
    """
    words = shlex.split(line, comments=True)
    interpreted = words[0] == INTERPRET
    with patch.object(device, "interpreting", lambda: interpreted):
        return _run_words(line, words[interpreted:])


def _run_words(line: str, words: Sequence[str]) -> Outcome:
    stdin = None
    if "|" in words:
        at = words.index("|")
        stdin, words = _fed(words[:at]), words[at + 1 :]
    if words[0] != "twinfer" or any(word in (">", "<", "|", "&&", ";") for word in words):
        raise ValueError(f"{line!r}: not a line that the tests can run")
    return run(*words[1:], stdin=stdin)


def _fed(words: Sequence[str]) -> str:
    if words[0] == "echo" and len(words) == 2:
        return words[1] + "\n"
    if words[0] == "printf" and len(words) == 2:
        return words[1].replace("\\n", "\n")
    raise ValueError(f"{words}: not a command that the tests can run")
