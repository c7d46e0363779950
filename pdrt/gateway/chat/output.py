"""From the text of an answer to content, reasoning and tool calls. Pure.

Reasoning is taken off first, tool calls are looked for in the rest: what a model thinks about
calling is no call.
"""

from __future__ import annotations

from pdrt.gateway.chat.calls import (
    CallParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NewId,
)
from pdrt.gateway.chat.deltas import Content, Delta, ToolCallArguments, ToolCallStart, merged
from pdrt.gateway.chat.parser import ReasoningParser
from pdrt.gateway.chat.pythonic import PythonicParser
from pdrt.gateway.chat.styles import THINK_BEGIN, THINK_END, ReasoningStart, ToolStyle
from pdrt.gateway.chat.tools import ToolPlan

PARSERS: dict[ToolStyle, type[CallParser]] = {
    ToolStyle.HERMES: HermesParser,
    ToolStyle.LLAMA3_JSON: Llama3JsonParser,
    ToolStyle.MISTRAL: MistralParser,
    ToolStyle.PYTHONIC: PythonicParser,
}
MARKERS = {
    ToolStyle.HERMES: ("<tool_call>", "</tool_call>"),
    ToolStyle.LLAMA3_JSON: ("<|python_tag|>",),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ToolStyle.PYTHONIC: ("<|python_start|>", "<|python_end|>"),
}


class OutputParser:
    """Of one choice. However the text is cut into pieces, the deltas joined are the same."""

    def __init__(self, plan: ToolPlan, start: ReasoningStart, new_id: NewId) -> None:
        """`plan` says which calls to look for, `start` whether there may be reasoning; `new_id`
        gives 24 random hexadecimal digits."""
        self._reasoning = None if start is ReasoningStart.OVER else ReasoningParser(start)
        self._calls = None if plan.style is None else PARSERS[plan.style](plan.names, new_id)
        self._calls_max = plan.calls_max

    def push(self, text: str) -> list[Delta]:
        """What more text makes certain. Text that may still become a marker is held back."""
        if self._reasoning is None:
            return self._push_calls([Content(text)])
        return self._push_calls(self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        """What was held back. The last call. A call that the output's end cut off stays cut."""
        deltas = [] if self._reasoning is None else self._push_calls(self._reasoning.finish())
        if self._calls is not None:
            deltas += self._allowed(self._calls.finish())
        return merged(deltas)

    def _push_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return merged(deltas)
        result: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                result += self._allowed(self._calls.push(delta.text))
            else:
                result.append(delta)
        return merged(result)

    def _allowed(self, deltas: list[Delta]) -> list[Delta]:
        """Without the calls that are too many: the model was not to make them."""
        most = self._calls_max
        if most is None:
            return deltas
        return [
            delta
            for delta in deltas
            if not isinstance(delta, ToolCallStart | ToolCallArguments) or delta.index < most
        ]


def special_markers(plan: ToolPlan, start: ReasoningStart) -> tuple[str, ...]:
    """Special tokens that this parser needs to see in the text: pass them to
    `Tokenizer.detokenizer(keep=…)`, which skips all others."""
    markers = () if plan.style is None else MARKERS[plan.style]
    return markers if start is ReasoningStart.OVER else (*markers, THINK_BEGIN, THINK_END)
