"""How a command fails: one line on stderr, `field = value: what it must be; what to do`, and an exit code. What is raised where is not decided here."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

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


def tell_usage(error: Any, given: Sequence[str]) -> int:
    """Says what is wrong with a command line that typer refused, in the words of our own errors, and gives the exit code.

    `error` is typer's UsageError (its context, and the parameter where there is one), `given` the words of the command line.
    """
    where = error.ctx.command_path if error.ctx is not None else " ".join(["twinfer", *given[:1]])
    say(f"error: {one_line(_wrong(error, given)).removesuffix('.')}; `{where} -h` lists what there is")
    return BAD_INPUT


def _wrong(error: Any, given: Sequence[str]) -> str:
    if getattr(error, "option_name", None) and hasattr(error, "possibilities"):
        meant = f" (did you mean {' or '.join(sorted(error.possibilities))}?)" if error.possibilities else ""
        return f"{error.option_name}: no such option{meant}"
    message = str(error.format_message())
    value = _value(getattr(error, "param", None), given)
    if value is not None:
        choices = re.search(r"is not one of (.+?)\.?$", message)
        expected = f"one of {choices[1]}" if choices else "an integer" if "integer" in message else "a number" if re.search("number|float", message) else None
        return f"{error.param.name} = {value!r}: {error.message if expected is None else 'must be ' + expected}"
    return message[:1].lower() + message[1:]


def _value(parameter: Any, given: Sequence[str]) -> str | None:
    """What the command line says for an option, where it says it once and can be read without typer's own rules."""
    found = []
    for word, following in zip(given, [*given[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if parameter is not None and name in parameter.opts and name.startswith("-"):
            found.append(value if equals else following)
    return found[0] if len(found) == 1 else None
