"""Where a prompt comes from: argument, file, standard input, or a default that is announced. Text only; tokens are the tokenizer's."""

from __future__ import annotations

import os
import random
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from twinfer.config import ModelConfig
from twinfer.serve.failure import BadInput, say
from twinfer.serve.model import Model, has_tokenizer

STDIN = "-"
# The bundled model was trained on plays, where a name on a line of its own opens a speech.
DEFAULT_BUNDLED = "ROMEO.\n"
DEFAULT_OTHER = "Once upon a time"
DEFAULT_IDS = 16  # random ones, where there is no tokenizer and no prompt
NO_TOKENIZER = "the model has no tokenizer.json, and another model's would mean other texts; give token ids with --prompt-ids"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was given: text, or token ids."""

    text: str | None
    ids: tuple[int, ...] | None


def read_any(argument: str | None, file: Path | None, ids: str | None, model: Model, random_seed: int | None) -> Prompt:
    """The prompt, as ids where they are given; a model with made-up weights and no tokenizer gets ids from its seed where there is no prompt.

    Raises BadInput naming where it was to come from.
    """
    if ids is not None:
        for name, other in (("prompt", argument), ("file", None if file is None else str(file))):
            if other is not None:
                raise BadInput(f"{name} = {other!r} and prompt_ids = {ids!r}: give one of them")
        return Prompt(None, tuple(parse_ids(ids)))
    if random_seed is None or has_tokenizer(model):
        return Prompt(read_prompt(argument, file, model), None)
    if argument is not None or file is not None:
        raise BadInput(f"{'prompt' if file is None else 'file'} = {str(file or argument)!r}: {NO_TOKENIZER}")
    if _is_fed(sys.stdin):
        raise BadInput(f"prompt (from standard input): {NO_TOKENIZER}")
    made = random_ids(random_seed, DEFAULT_IDS, ModelConfig.from_file(model.path).vocab_size)
    say(f"no prompt given and no tokenizer; using --prompt-ids {shown_ids(made)}")
    return Prompt(None, tuple(made))


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


def parse_ids(text: str) -> list[int]:
    """--prompt-ids, such as 1,2,3 (or with blanks), as token ids. Raises BadInput; which ids a model has is checked by its engine."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise BadInput(f"prompt_ids = {text!r}: must be token ids, such as 1,2,3")
    return [int(word) for word in words]


def random_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    """So many token ids from a seed, the same everywhere."""
    numbers = random.Random(seed)
    return [numbers.randrange(vocab_size) for _ in range(count)]


def shown_ids(ids: Sequence[int]) -> str:
    """Token ids in the form that --prompt-ids takes."""
    return ",".join(map(str, ids))


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
