"""Running an `OutputParser` over pieces of text, and looking at what came out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pdrt.gateway.chat.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from pdrt.gateway.chat.output import OutputParser
from pdrt.gateway.chat.styles import ReasoningStart, ToolStyle
from pdrt.gateway.chat.tools import ToolPlan

NAMES = frozenset({"get_weather", "get_time"})


@dataclass
class Answer:
    """All deltas of one output, joined."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    by_piece: list[str] = field(default_factory=list, compare=False)
    """What each piece brought, as text."""

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Names with decoded arguments."""
        return [
            (name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)
        ]

    def add(self, deltas: list[Delta]) -> None:
        assert deltas == merged(deltas), "more deltas than needed"
        shown = []
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                    shown.append(text)
                case Reasoning(text):
                    self.reasoning += text
                    shown.append(text)
                case ToolCallStart(index, call_id, name):
                    assert index == len(self.names)
                    self.ids.append(call_id)
                    self.names.append(name)
                    self.arguments.append("")
                    shown.append(f"{call_id} {name} ")
                case ToolCallArguments(index, text):
                    assert index == len(self.names) - 1, "arguments of a call that is over"
                    self.arguments[index] += text
                    shown.append(text)
        self.by_piece.append("".join(shown))


def make_parser(
    style: str | None,
    start: ReasoningStart = ReasoningStart.OVER,
    calls_max: int | None = None,
) -> OutputParser:
    """Ids are counted."""
    numbers = itertools.count()
    plan = ToolPlan(
        style=None if style is None else ToolStyle(style), names=NAMES, calls_max=calls_max
    )
    return OutputParser(plan, start, lambda: f"{next(numbers):024x}")


def parse(
    style: str | None,
    pieces: Iterable[str],
    start: ReasoningStart = ReasoningStart.OVER,
    calls_max: int | None = None,
) -> Answer:
    parser = make_parser(style, start, calls_max)
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer
