"""The `twinfer` command: its subcommands and its way out. Each subcommand is a file of its own; none imports torch before it needs it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, TextIO

import typer

import twinfer
from twinfer.serve.chat import chat
from twinfer.serve.compare import compare
from twinfer.serve.env import env
from twinfer.serve.failure import one_line, say, tell
from twinfer.serve.generate import generate
from twinfer.serve.plan import plan

TRACEBACK = "--traceback"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for command in (generate, chat, plan, compare, env):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twinfer {twinfer.__version__}")
        raise typer.Exit


@app.callback()
def twinfer_command(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)] = False,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="When a command fails, show where in the code.")] = False,
) -> None:
    """LLM inference for Qwen3: a reference engine to read and a fast engine to
    serve, which must agree.

    A small model is bundled, so that each command runs as it stands:

      $ twinfer generate "ROMEO."
      $ echo "Who art thou?" | twinfer chat
      $ twinfer plan qwen3 --memory 4GiB
      $ twinfer compare
      $ twinfer env

    Results go to standard output, everything else to stderr. Exit codes: 0
    done, 1 failed, 2 bad input, 130 interrupted.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (sys.argv without `arguments`) and ends the process by SystemExit; an error is one line, never a traceback."""
    if sys.stdout is None:  # started with its standard output closed: there is nobody to tell results to
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    given = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets a question mark, not an exception in the middle of a text.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            app(args=given, prog_name="twinfer")
        except Exception as error:
            sys.exit(tell(error, with_traceback=TRACEBACK in given))


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None) -> None:
    """A library's warning as one line; which line of whose code gave it is no help to who types a command."""
    say(f"warning: {one_line(str(message))}")
