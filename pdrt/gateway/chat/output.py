"""From the text of an answer to content, reasoning and tool calls. Pure.

Reasoning is taken off first, tool calls are looked for in the rest: what a model thinks about
calling is no call.
"""

from __future__ import annotations

from collections.abc import Callable

from pdrt.gateway.chat.deltas import Content, Delta
from pdrt.gateway.chat.styles import ReasoningStart
from pdrt.gateway.chat.tools import ToolPlan

NewId = Callable[[], str]
"""Gives 24 random hexadecimal digits; passed in, so that all of this is pure."""


class OutputParser:
    """Of one choice. However the text is cut into pieces, the deltas joined are the same."""

    def __init__(self, plan: ToolPlan, start: ReasoningStart, new_id: NewId) -> None:
        """`plan` says which calls to look for, `start` whether there may be reasoning."""

    def push(self, text: str) -> list[Delta]:
        """What more text makes certain. Text that may still become a marker is held back."""
        return [Content(text)]

    def finish(self) -> list[Delta]:
        """What was held back. The last call. A call that the output's end cut off stays cut."""
        return []


def special_markers(plan: ToolPlan, start: ReasoningStart) -> tuple[str, ...]:
    """Special tokens that this parser needs to see in the text: pass them to
    `Tokenizer.detokenizer(keep=…)`, which skips all others."""
    return ()
