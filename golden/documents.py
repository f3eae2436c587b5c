"""Which prompts the goldens hold and which positions of each are stored. Token ids come from the tokenizer; nothing here runs a model.

A *document* is stored once; a *case* is a prefix of one. Attention is causal, so a prefix shares its positions with the document, and a
case at every boundary costs nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from twinfer.golden.family import FAMILY
from twinfer.golden.recipe import SYSTEM_PROMPT
from twinfer.golden.tokenizer import TURN_START, render_conversation

PAGE = 16  # tokens; the boundary cases sit around it, and the repeated document is one page over and over

# Positions, as half-open ranges.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One prompt and the positions that are stored of it.

    `fine`: float64 top-k; `coarse`, part of `fine`: fp32 and bf16 as well; `full`: float64 logits of the whole vocabulary, layer boundaries.
    """

    name: str
    length: int
    fine: Ranges
    coarse: Ranges
    full: tuple[int, ...]


# Of the later types. Shorter than the dense model's: the reference computes a state token by token. Some 850 positions in every precision.
_FAMILY = (
    Document("comedy", 1025, ((0, 128), (448, 576), (833, 1025)), ((0, 128), (448, 576), (833, 1025)), (0, 63, 64, 511, 512, 1023, 1024)),
    Document("tragedy", 257, ((0, 257),), ((0, 257),), (0, 127, 128, 255, 256)),
    Document("repeated", 80, ((0, 80),), ((0, 80),), (79,)),
    Document("chat", 64, ((0, 64),), ((0, 64),), (63,)),
)

# Half-open ranges and counts are chosen by size: at most 2.5 MB of goldens for qwen3 (vocabulary 2048), 0.5 MB for micro, 1.5 MB for the later types.
LAYOUTS: dict[str, tuple[Document, ...]] = {
    **dict.fromkeys(FAMILY, _FAMILY),
    "qwen3": (
        Document("comedy", 2049, ((0, 2049),), ((0, 128), (960, 1088), (1857, 2049)), (0, 15, 16, 63, 64, 1023, 1024, 2047, 2048)),
        Document("tragedy", 257, ((0, 257),), ((0, 257),), (0, 127, 128, 255, 256)),
        Document("repeated", 80, ((0, 80),), ((0, 80),), (79,)),
        Document("chat", 64, ((0, 64),), ((0, 64),), (63,)),
    ),
    "micro": (
        Document("comedy", 2049, ((0, 16), (1016, 1032), (2033, 2049)), ((0, 16), (1016, 1032), (2033, 2049)), (0, 1024, 2048)),
        Document("tragedy", 257, ((0, 257),), ((0, 80), (112, 136), (241, 257)), (0, 14, 15, 16, 62, 63, 64, 127, 128, 255, 256)),
        Document("repeated", 48, ((0, 48),), ((0, 48),), (47,)),
        Document("chat", 48, ((0, 48),), ((32, 48),), (47,)),
    ),
}

# Around one token, a page, a chunk of 64, two and four of them; past 1024 and 2048; whole documents for the last two.
CASE_LENGTHS: dict[str, tuple[int, ...]] = {
    "tragedy": (1, 2, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    "comedy": (1025, 2049),
}

_CHAT = ["When shall we three meet again?", "When the hurlyburly's done,\nWhen the battle's lost and won."]


def layout(model_name: str) -> tuple[Document, ...]:
    """The documents of a golden model; one without an entry of its own gets qwen3's."""
    return LAYOUTS.get(model_name, LAYOUTS["qwen3"])


def spread(ranges: Ranges) -> list[int]:
    """The positions of `ranges` in order."""
    return [position for start, stop in ranges for position in range(start, stop)]


def cases(documents: Iterable[Document]) -> dict[str, tuple[str, int]]:
    """Case name -> (document name, length)."""
    listed: dict[str, tuple[str, int]] = {}
    for document in documents:
        for length in (length for length in CASE_LENGTHS.get(document.name, (document.length,)) if length <= document.length):
            name = f"{document.name}_{length}" if document.name in CASE_LENGTHS else document.name
            listed[name] = (document.name, length)
    return listed


def token_ids(document: Document, tokenizer_file: Path, prompts: Path) -> list[int]:
    """The ids [length] of `document`.

    comedy, tragedy: the head of prompts/<name>.txt; repeated: tragedy's first page over and over; chat: a system prompt, one exchange and a
    second question, cut at `length`. Raises `ValueError` if the text is too short.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if document.name == "chat":
        ids = tokenizer.encode(render_conversation([*_CHAT, *_CHAT[:1]], SYSTEM_PROMPT) + f"{TURN_START}assistant\n").ids
    else:
        source = "tragedy" if document.name == "repeated" else document.name
        ids = tokenizer.encode((prompts / f"{source}.txt").read_text()).ids
        if document.name == "repeated":
            ids = ids[:PAGE] * -(-document.length // PAGE)
    if len(ids) < document.length:
        raise ValueError(f"document '{document.name}': {len(ids)} tokens of text, {document.length} wanted")
    return list(ids[: document.length])
