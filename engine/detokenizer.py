"""Streaming text of one output: whole characters as soon as their last byte is there. It looks at no text twice and takes none back.

The text of byte-level tokens is the UTF-8 decoding of their bytes (twinfer.engine.tokenizer), so an incremental UTF-8 decoder is all that is needed:
it holds back at most three bytes, costs what the new bytes cost, and writes U+FFFD where the tokenizer's own decoding of the whole sequence does.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from twinfer.engine.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one output into text. All pushes and finish, joined, equal `tokenizer.decode(ids, skip_special_tokens)`.

    The text is that of the output alone: a prompt that ends within a character (possible only with a prompt of raw ids) lends it no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete: whole characters only, possibly empty."""
        added = b"".join(self._tokenizer.token_bytes(token) for token in token_ids if token not in self._skipped)
        return self._decoder.decode(added)

    def finish(self) -> str:
        """Text of the bytes that are held back: U+FFFD for a character that never became whole. Nothing may be pushed afterwards."""
        return self._decoder.decode(b"", final=True)
