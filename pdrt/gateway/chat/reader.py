"""Text that arrives in pieces, read as if all of it were there. Pure.

A parser is a generator: where it needs more text it yields, and goes on when there is some. So it
reads as the grammar of what it parses, and how the text is cut cannot matter. (Tables of states
were tried: three times the code, and the grammar was lost in it.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Of a function that may have to wait for text, and then returns a T."""
Write = Callable[[str], None]

HELD_CHARACTERS_MAX = 64 * 1024
"""Text read of something that is not certain yet to be a call. What needs more is none."""
SPACE = re.compile(r"[ \t\r\n]+")


class NotACall(Exception):
    """The text is not what it looked like. What is held shows it."""


class Reader:
    """A cursor in a text that grows. Text read is held until it is dropped or released."""

    def __init__(self) -> None:
        self._text = ""
        """From before the cursor on; where a parser waits, few characters of it are unread."""
        self._at = 0
        self._closed = False
        """Nothing more comes."""
        self._held: list[str] = []
        self._room = HELD_CHARACTERS_MAX
        """Characters that may be held still."""

    def feed(self, text: str) -> None:
        """Add text at the end."""
        assert not self._closed, "text after the end"
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True

    def peek(self) -> Steps[str]:
        """The next character, unread; empty at the end."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def follows(self, literal: str) -> Steps[bool]:
        """Whether the unread text begins with `literal`."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                return True
            if self._closed or not literal.startswith(ahead):
                return False
            yield

    def take(self, count: int = 1) -> str:
        """Read characters that are known to be there."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count, "characters that nobody has seen"
        if count > self._room:
            raise NotACall
        self._at += count
        self._room -= count
        self._held.append(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what is there of a run of a class of characters, of which the next one is known to
        be; there may be more of it."""
        match = pattern.match(self._text, self._at, self._at + max(1, self._room))
        assert match is not None, "the next character is of another class"
        return self.take(match.end() - self._at)

    def expect(self, literal: str) -> Steps[None]:
        """Read `literal`. Raises `NotACall` where there is something else."""
        if not (yield from self.follows(literal)):
            raise NotACall
        self.take(len(literal))

    def space(self, write: Write | None = None) -> Steps[str]:
        """Read white space, which goes to `write`; the next character after it, unread."""
        while True:
            character = yield from self.peek()
            if character not in (" ", "\t", "\r", "\n"):
                return character
            text = self.run(SPACE)
            if write is not None:
                write(text)

    def until(self, markers: Sequence[str], write: Write) -> Steps[bool]:
        """Read up to and with the first of `markers`. Text before it goes to `write` and is not
        held, the marker is. False where the text ends without one."""
        while True:
            found = [(at, m) for m in markers if (at := self._text.find(m, self._at)) >= 0]
            if found:
                at, marker = min(found)
                self._pass(at, write)
                self.take(len(marker))
                return True
            pending = 0 if self._closed else self._pending(markers)
            self._pass(len(self._text) - pending, write)
            if self._closed:
                return False
            yield

    def drop(self, _: str = "") -> None:
        """What is held is accounted for."""
        self._held.clear()
        self._room = HELD_CHARACTERS_MAX

    def release(self) -> str:
        """What is held, which is then held no more."""
        held = "".join(self._held)
        self.drop()
        return held

    def _pass(self, end: int, write: Write) -> None:
        if end > self._at:
            write(self._text[self._at : end])
            self._at = end

    def _pending(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the text that begins a marker."""
        longest = 0
        for marker in markers:
            at = max(self._at, len(self._text) - len(marker) + 1)
            while (at := self._text.find(marker[0], at)) >= 0:
                if marker.startswith(self._text[at:]):
                    longest = max(longest, len(self._text) - at)
                    break
                at += 1
        return longest
