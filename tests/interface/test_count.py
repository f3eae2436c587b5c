"""Counts in words: one token, two tokens."""

from __future__ import annotations

import pytest

from twinfer.count import Count


@pytest.mark.parametrize(
    ("count", "words"),
    [(Count(1, "token"), "1 token"), (Count(0, "token"), "0 tokens"), (Count(4096, "page"), "4096 pages"), (Count(1, "entry", "entries"), "1 entry"),
     (Count(2, "entry", "entries"), "2 entries")],
)  # fmt: skip
def test_words(count: Count, words: str) -> None:
    assert (str(count), repr(count), f"{count}") == (words,) * 3


def test_a_format_is_the_numbers() -> None:
    assert f"{Count(4096, 'page'):,}" == "4,096 pages"
