"""Stop strings in streamed text: what may be shown now, and when the output ends. It sees characters only; stop tokens are the scheduler's.

The rule. The output ends at the first character that completes a stop string. If that character completes several, the longest counts (the one that
begins first). The rule reads the text character by character and never needs what follows a match, so it gives the same answer however the text is
cut into pushes, and generation ends at the earliest token that it can. With stops "ab" and "abc" the second can therefore never match, and of "bcd"
and "c" in "abcd" it is "c".
"""

from __future__ import annotations

from collections.abc import Sequence

from twinfer.errors import RequestRefused


class StopMatcher:
    """Matches the stop strings of one output. `matched` is the string that ended it, or None.

    Text that could be the beginning of a stop string is held back: at most the length of the longest stop string less one. The cost is linear in text
    and stop strings.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """With include_stop the text ends after the stop string, else before it. Raises RequestRefused for an empty string."""
        if "" in stops:
            raise RequestRefused("stop", list(stops), "strings of length at least 1")
        self.matched: str | None = None
        self._include_stop = include_stop
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""  # end of the text that is not yet given out: the longest one that begins a stop string

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next text; gives the text to show now and the stop string that ended the output, if one has.

        armed is False for the text of tokens that min_tokens forbids to end the output: a stop string that such text completes is ordinary text. One
        that begins there and is completed by armed text counts. After a match all further text is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        for end in range(len(self._held), len(text)):
            complete = [pattern.stop for pattern in self._patterns if pattern.advance(text[end])]
            if complete and armed:
                self.matched, self._held = complete[0], ""
                return text[: end + 1 if self._include_stop else end + 1 - len(complete[0])], self.matched
        keep = max((pattern.begun for pattern in self._patterns), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown, None

    def finish(self) -> str:
        """Text still held back when the output ends for another reason; empty after a match."""
        rest, self._held = self._held, ""
        return rest


class _Pattern:
    """One stop string and how far the text's end has got into it (Knuth, Morris, Pratt): `begun` characters, always fewer than all."""

    def __init__(self, stop: str) -> None:
        self.stop, self.begun = stop, 0
        # fallback[i]: how much of the stop string still counts as begun when its first i + 1 characters are there and the next one does not fit.
        self._fallback = [0]
        for character in stop[1:]:
            self._fallback.append(self._extend(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Takes one character; says whether it completes the stop string."""
        self.begun = self._extend(self.begun, character)
        complete = self.begun == len(self.stop)
        if complete:
            self.begun = self._fallback[-1]
        return complete

    def _extend(self, begun: int, character: str) -> int:
        while begun > 0 and self.stop[begun] != character:
            begun = self._fallback[begun - 1]
        return begun + 1 if self.stop[begun] == character else begun
