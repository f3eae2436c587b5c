"""Where a prompt comes from: argument, file, standard input, or a default that is announced. Text only; tokens are the tokenizer's."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TextIO

from twinfer.serve.failure import BadInput, say
from twinfer.serve.model import Model

STDIN = "-"
# The bundled model was trained on plays, where a name on a line of its own opens a speech.
DEFAULT_BUNDLED = "ROMEO.\n"
DEFAULT_OTHER = "Once upon a time"


def read_prompt(argument: str | None, file: Path | None, model: Model) -> str:
    """The prompt's text, exactly as given, a newline at its end included. Raises BadInput naming where it was to come from."""
    if argument is not None and file is not None:
        raise BadInput(f"prompt = {argument!r} and file = {str(file)!r}: give one of them")
    if file is not None and str(file) != STDIN:
        return _not_empty(_decode(_read_file(file), str(file)), str(file))
    if argument is not None and argument != STDIN:
        return _not_empty(argument, "the argument")
    if argument is None and file is None and not _is_fed(sys.stdin):
        text = DEFAULT_BUNDLED if model.bundled else DEFAULT_OTHER
        say(f"no prompt given; using {text!r} (give your own as an argument, with --file, or on standard input)")
        return text
    return _not_empty(_decode(sys.stdin.buffer.read(), "standard input"), "standard input")


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(f"file = {str(file)!r}: can't be read ({error.strerror}); give a text file in UTF-8, or - for standard input") from None


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"prompt (from {source}): must be UTF-8 text; byte {error.start} (0x{data[error.start]:02x}) is not: {error.reason}") from None


def _not_empty(text: str, source: str) -> str:
    if not text:
        raise BadInput(f"prompt = '' (from {source}): must be at least 1 character")
    return text


def _is_fed(stream: TextIO | None) -> bool:
    """Whether somebody feeds standard input: a pipe or a file, not a terminal and not the null device that services and containers give."""
    if stream is None or stream.isatty():
        return False
    try:
        return not stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # a stream without a file behind it
        return True
