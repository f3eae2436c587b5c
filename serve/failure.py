"""How a command fails: one line on stderr that names the remedy, and an exit code. Never a traceback; what is raised where is not decided here."""

from __future__ import annotations

import sys
import traceback

from twinfer.errors import TwinferError

BAD_INPUT = 2  # as typer's own usage errors
FAILED = 1
INTERRUPTED = 130  # what a shell reports for SIGINT


class BadInput(TwinferError, ValueError):
    """An argument of a command, or the file that it names, can't be used: says which, what it is and what would do."""


class NotAvailable(TwinferError):
    """What a command needs is not on this machine or not in this build: says what, and what to use instead."""


def say(text: str) -> None:
    """One line for people, on stderr: stdout holds nothing but what a command makes."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """`text` without line breaks, whatever a library put into its message."""
    return " ".join(text.split())


def tell(error: Exception, with_traceback: bool) -> int:
    """Says why a command failed, and gives its exit code."""
    if with_traceback:
        traceback.print_exception(error)
    if isinstance(error, TwinferError):
        say(f"error: {one_line(str(error))}")
        return BAD_INPUT if isinstance(error, ValueError) else FAILED
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        say(f"error: out of memory ({one_line(str(error))}); lower --memory, --max-context or --max-batch, or take a smaller --dtype")
        return FAILED
    if isinstance(error, OSError):
        say(f"error: {one_line(str(error))}")
        return FAILED
    # Whatever arrives here is a fault of twinfer's own: bad input has a class above.
    what = f"{type(error).__name__}: {one_line(str(error))}"
    say(f"error: {what} (this is a fault in twinfer; `twinfer --traceback ...` shows where, please report it with the output of `twinfer env`)")
    return FAILED
