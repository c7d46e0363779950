"""What parsers of output text have in common, and reasoning, the first of them. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pdrt.gateway.chat.deltas import Content, Delta, Reasoning, merged
from pdrt.gateway.chat.reader import NotACall, Reader, Steps
from pdrt.gateway.chat.styles import THINK_BEGIN, THINK_END, ReasoningStart


class Parser(ABC):
    """Turns text into deltas. However it is cut into pieces, the deltas joined are the same, and
    all text is in them, but for markers and the white space next to them."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._deltas: list[Delta] = []
        """Found since the last call."""
        self._steps = self._parse()
        """Stands where more text is needed."""

    def push(self, text: str) -> list[Delta]:
        """What more text makes certain. Its cost does not depend on the text before."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was held back. The last call."""
        self._reader.close()
        return self._advance()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read all text; what it is goes into `_deltas`."""

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = merged(self._deltas), []
        return deltas

    def _content(self, text: str) -> None:
        self._deltas.append(Content(text))

    def _content_until(self, marker: str) -> Steps[bool]:
        """Text up to `marker` is content; False where none comes."""
        return self._reader.until((marker,), self._content)

    def _give_up(self) -> None:
        """What is held is content after all."""
        self._content(self._reader.release())


class ReasoningParser(Parser):
    """`<think>…</think>`, once, before anything else."""

    def __init__(self, start: ReasoningStart) -> None:
        self._start = start
        super().__init__()

    def _parse(self) -> Steps[None]:
        inside = self._start is ReasoningStart.INSIDE
        if self._start is ReasoningStart.POSSIBLE:
            inside = yield from self._begins()
        if inside:
            yield from self._reader.space(self._reader.drop)
            yield from self._reader.until((f"\n{THINK_END}", THINK_END), self._reasoning)
            self._reader.drop()
            yield from self._reader.space(self._reader.drop)
        yield from self._reader.until((), self._content)

    def _begins(self) -> Steps[bool]:
        try:
            yield from self._reader.space()
            yield from self._reader.expect(THINK_BEGIN)
        except NotACall:
            self._give_up()
            return False
        self._reader.drop()
        return True

    def _reasoning(self, text: str) -> None:
        self._deltas.append(Reasoning(text))
