"""Stop strings in a text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class _Beginning:
    """How much of one stop string a text ends with (Knuth, Morris and Pratt). A character costs a
    few steps whatever the two hold: comparing every end of the text with every beginning took tens
    of milliseconds per token of a text made for that."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]
        """Of its first 1, 2, ... characters: the longest proper beginning that is an end, too. As
        far as they have been needed."""
        self.length = 0

    def push(self, text: str) -> None:
        """More text, in which the stop string is not complete."""
        at = 0
        while at < len(text):
            if self.length == 0:  # mostly: C finds what may begin it
                at = text.find(self._stop[0], at)
                if at < 0:
                    return
            self.length = self._after(self.length, text[at])
            assert self.length < len(self._stop), "the stop string is complete"
            if self.length > len(self._borders):
                last = self._stop[self.length - 1]
                self._borders.append(self._after(self._borders[-1], last))
            at += 1

    def _after(self, length: int, character: str) -> int:
        """Of a text that ends with the first `length` characters, after one more."""
        while length and self._stop[length] != character:
            length = self._borders[length - 1]
        return length + (self._stop[length] == character)


class StopMatcher:
    """Lets text through up to the first stop string, however the text is cut into pieces.

    The stop string that is complete first wins; of several complete at the same character, the
    longest. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], shows_stop: bool = False) -> None:
        """`stops` are not empty strings; no stops at all lets everything through. `shows_stop`:
        the stop string goes through too."""
        assert all(stops), "a stop string is empty"
        self._stops = tuple(stops)
        self._beginnings = [_Beginning(stop) for stop in stops]
        self._shows_stop = shows_stop
        self._held = ""
        """The longest suffix of the text that begins a stop string; holds no complete one."""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `stopped` when a stop string is complete."""
        assert not self.stopped, "text after a stop string"
        if not self._stops:
            return text
        new, text = text, self._held + text
        end, start = min(
            ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=(0, None),
        )
        if start is not None:
            assert end > start
            self.stopped = True
            self._held = ""
            return text[: end if self._shows_stop else start]
        for beginning in self._beginnings:
            beginning.push(new)
        cut = len(text) - max(beginning.length for beginning in self._beginnings)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held
