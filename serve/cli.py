"""The `twinfer` command: its subcommands and its way out. Each subcommand is a file of its own; none imports torch before it needs it."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

import twinfer
from twinfer.serve.bounds import bounds
from twinfer.serve.chat import chat
from twinfer.serve.check import check
from twinfer.serve.compare import compare
from twinfer.serve.env import env
from twinfer.serve.failure import INTERRUPTED, one_line, say, tell, tell_usage
from twinfer.serve.generate import generate
from twinfer.serve.plan import plan

TRACEBACK = "--traceback"

# What typer raises for a command line that it can't read; it exports none of the names of this family but one.
USAGE: type[Exception] = typer.BadParameter.__bases__[0]


def unwrapped(described: Callable[..., Any]) -> str:
    """A docstring for a terminal of any width: each paragraph is one line, indented lines (examples) stay."""
    paragraphs = re.split(r"\n{2,}", inspect.getdoc(described) or "")
    return "\n\n".join(text if text.startswith(" ") else " ".join(text.split()) for text in paragraphs)


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def without_type_names(params: list[Any]) -> list[Any]:
    """A command's parameters, shown in help by what they are called and not by Python's names of types: a flag takes no `<bool>`, a MODEL is no `<str>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    return params


class Command(TyperCommand):
    """A command whose help has no names of types."""

    def get_params(self, ctx: Any) -> Any:
        return without_type_names(super().get_params(ctx))


class Group(TyperGroup):
    """The same of `twinfer` itself."""

    def get_params(self, ctx: Any) -> Any:
        return without_type_names(super().get_params(ctx))


app = typer.Typer(
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, plan, bounds, compare, check, env):
    app.command(cls=Command, help=unwrapped(command), short_help=_first_sentence(unwrapped(command)))(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twinfer {twinfer.__version__}")
        raise typer.Exit


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
      $ twinfer bounds qwen3
      $ twinfer compare
      $ twinfer check --law2
      $ twinfer env

    Results go to standard output, everything else to stderr.

    Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
    """


app.callback(help=unwrapped(twinfer_command))(twinfer_command)


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
            # Without a word it shows what it can do, which is no mistake of anybody's.
            code = app(args=given or ["--help"], prog_name="twinfer", standalone_mode=False)
        except typer.Abort:
            code = INTERRUPTED
        except USAGE as error:
            code = tell_usage(error, given)
        except Exception as error:
            code = tell(error, with_traceback=TRACEBACK in given)
    if code == INTERRUPTED:
        say("interrupted")
    sys.exit(code or 0)


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None) -> None:
    """A library's warning as one line; which line of whose code gave it is no help to who types a command."""
    say(f"warning: {one_line(str(message))}")
