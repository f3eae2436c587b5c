"""Stop strings against a plain reading of the rule, however the text is cut into pushes; tokens and bytes are the detokenizer's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.budget import examples, repeatable
from twinfer.engine.stop import StopMatcher
from twinfer.errors import RequestRefused

SETTINGS = settings(max_examples=examples(300), deadline=None, derandomize=repeatable())
# Two letters, so that stop strings overlap, repeat and contain each other.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
PUSHES = st.lists(st.text("ab", max_size=4), max_size=10)


def plain(stops: list[str], pushes: list[tuple[str, bool]], include_stop: bool) -> tuple[str, str | None]:
    """The rule read off the whole text: the first armed character that completes a stop string, and the longest that it completes."""
    text = "".join(part for part, _ in pushes)
    armed = [flag for part, flag in pushes for _ in part]
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and armed[end - 1]:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def run(stops: list[str], pushes: list[tuple[str, bool]], include_stop: bool) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop)
    pieces = [matcher.push(text, armed=armed)[0] for text, armed in pushes]
    return [*pieces, matcher.finish()], matcher.matched


@SETTINGS
@given(stops=STOPS, pushes=PUSHES, unarmed=st.integers(0, 5), include_stop=st.booleans())
def test_equals_the_rule_read_off_the_whole_text(stops: list[str], pushes: list[str], unarmed: int, include_stop: bool) -> None:
    marked = [(text, i >= unarmed) for i, text in enumerate(pushes)]
    pieces, matched = run(stops, marked, include_stop)
    assert ("".join(pieces), matched) == plain(stops, marked, include_stop)


@SETTINGS
@given(stops=STOPS, pushes=PUSHES, include_stop=st.booleans())
def test_does_not_depend_on_how_the_text_is_cut(stops: list[str], pushes: list[str], include_stop: bool) -> None:
    text = "".join(pushes)
    cut, matched = run(stops, [(part, True) for part in pushes], include_stop)
    for other in ([(text, True)], [(character, True) for character in text]):
        pieces, other_matched = run(stops, other, include_stop)
        assert ("".join(pieces), other_matched) == ("".join(cut), matched)


@SETTINGS
@given(stops=STOPS, pushes=PUSHES)
def test_holds_back_exactly_what_could_begin_a_stop_string(stops: list[str], pushes: list[str]) -> None:
    """Not less, or shown text would have to be taken back; not more, or the stream would lag."""
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for part in pushes:
        text += part
        emit, matched = matcher.push(part)
        shown += emit
        if matched is not None:
            break
        held = text[len(shown) :]
        ends = [text[i:] for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
        assert held == max(ends, key=len, default="")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "one END two", "one ", "END"),
        (["ab", "abc"], "xabc", "x", "ab"),  # completed first, though the other is longer
        (["bcd", "c"], "abcd", "ab", "c"),  # completed first, though the other begins first
        (["cd", "bcd"], "abcd", "a", "bcd"),  # completed by one character: the longest
        (["aab"], "aaab", "a", "aab"),  # begins within a failed beginning
        (["日本"], "これは日本語", "これは", "日本"),
        (["x"], "no stop", "no stop", None),
        ([], "any", "any", None),
    ],
)
def test_examples(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    for pushes in ([text], list(text)):
        pieces, found = run(stops, [(part, True) for part in pushes], include_stop=False)
        assert ("".join(pieces), found) == (shown, matched)


def test_unarmed_text_may_begin_a_stop_string_but_not_complete_one() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STOP, ST", armed=False) == ("a STOP, ", None)
    assert matcher.push("OP b", armed=True) == ("", "STOP")
    assert matcher.finish() == ""


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["."], include_stop=True)
    assert matcher.push("a. b") == ("a.", ".")
    assert matcher.push("more") == ("", ".")
    assert matcher.finish() == ""
    assert matcher.matched == "."


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestRefused, match="stop"):
        StopMatcher(["a", ""])


def test_long_stop_strings_cost_what_they_are_long() -> None:
    """A quadratic table of a stop string this long would not fit in memory."""
    stop = "a" * 200_000 + "b"
    matcher = StopMatcher([stop])
    assert matcher.push("a" * 200_010) == ("a" * 10, None)
    assert matcher.push("b") == ("", stop)
