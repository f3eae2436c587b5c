"""Streaming text against decoding everything at once, over any text and any sequence of ids; stop strings are tested apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.engine.detokenizer import Detokenizer
from twinfer.engine.tokenizer import Tokenizer

SETTINGS = settings(max_examples=examples(200), deadline=None, derandomize=repeatable())
KINDS = st.sampled_from(["bpe", "bytes"])
Load = Callable[[str], Tokenizer]

# Bytes that open, continue, break and overrun UTF-8 sequences, dense enough for every kind of damage.
NASTY = [0x00, 0x41, 0x80, 0xBF, 0xC0, 0xC2, 0xE0, 0xA0, 0x9F, 0xED, 0xEF, 0xBB, 0xBD, 0xF0, 0x90, 0x8F, 0xF4, 0xF5, 0xFF]


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    """What each push and the finish give, with pushes of `cuts` ids in turn, then of one."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for size in [*cuts, *[1] * len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


@SETTINGS
@given(kind=KINDS, text=st.text(), cuts=st.lists(st.integers(0, 4), max_size=6))
def test_any_text_survives(load: Load, kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = load(kind)
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@SETTINGS
@given(kind=KINDS, ids=st.lists(st.integers(0, 420), max_size=40), cuts=st.lists(st.integers(0, 4), max_size=6), skip=st.booleans())
def test_any_ids_equal_the_full_decode(load: Load, kind: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    """Special, added and unknown ids included."""
    tokenizer = load(kind)
    assert "".join(stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(SETTINGS, max_examples=examples(400))
@given(ids=st.lists(st.sampled_from(NASTY), max_size=30), cuts=st.lists(st.integers(0, 4), max_size=6))
def test_broken_utf8_equals_the_full_decode(load: Load, ids: list[int], cuts: list[int]) -> None:
    tokenizer = load("bytes")
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@SETTINGS
@given(text=st.text(min_size=1))
def test_a_character_comes_whole_with_its_last_byte(load: Load, text: str) -> None:
    """One byte a push: each character is given out exactly then, nothing before it and nothing later."""
    tokenizer = load("bytes")
    detokenizer = Detokenizer(tokenizer)
    for character in text:
        *first, last = character.encode("utf-8")
        assert [detokenizer.push([byte]) for byte in first] == [""] * len(first)
        assert detokenizer.push([last]) == character
    assert detokenizer.finish() == ""


def test_unfinished_character_is_flushed_as_the_full_decode_writes_it(load: Load) -> None:
    tokenizer = load("bytes")
    ids = list("a👍".encode())[:-1]
    assert stream(tokenizer, ids, []) == ["a", "", "", "", "�"]
    assert tokenizer.decode(ids) == "a�"


def test_a_replacement_character_in_the_text_is_not_held_back(load: Load) -> None:
    """Telling U+FFFD in the text from damage by looking at decoded text is a known fault of streaming."""
    tokenizer = load("bytes")
    assert stream(tokenizer, list("x�".encode()), []) == ["x", "", "", "�", ""]


def test_damage_without_end_is_not_held_back(load: Load) -> None:
    tokenizer = load("bytes")
    assert stream(tokenizer, [0x80] * 50, []) == ["�"] * 50 + [""]


def test_special_tokens_do_not_split_a_character_when_skipped(load: Load) -> None:
    tokenizer = load("bytes")
    end = tokenizer.eos_ids[0]
    ids = [0xC3, end, 0xA9]
    assert "".join(stream(tokenizer, ids, [])) == tokenizer.decode(ids) == "é"
    assert "".join(stream(tokenizer, ids, [], skip=False)) == tokenizer.decode(ids, skip_special_tokens=False) == "�<|im_end|>�"


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_each_token_is_looked_at_once(load: Load, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear cost: as many look-ups as tokens, and no decoding of the sequence."""
    tokenizer = load(kind)
    seen: list[int] = []
    real = tokenizer.token_bytes

    def counted(token: int) -> bytes:
        seen.append(token)
        return real(token)

    monkeypatch.setattr(tokenizer, "token_bytes", counted)
    monkeypatch.setattr(tokenizer, "decode", None)
    ids = [5, 0x80, 66, 0xE3] * 50
    stream(tokenizer, ids, [])
    assert seen == ids
