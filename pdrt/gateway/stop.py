"""Stop strings in a text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


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
        self._shows_stop = shows_stop
        self._held = ""
        """The longest suffix of the text that begins a stop string; holds no complete one."""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `stopped` when a stop string is complete."""
        assert not self.stopped, "text after a stop string"
        text = self._held + text
        end, start = min(
            ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=(0, None),
        )
        if start is not None:
            assert end > start
            self.stopped = True
            self._held = ""
            return text[: end if self._shows_stop else start]
        cut = len(text) - self._pending_length(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _pending_length(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
