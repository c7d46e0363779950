"""How a model writes tool calls and reasoning: told by flags, or read off its chat template. Pure.

A template renders past calls as the model is to write new ones, so its text holds the markers.
"""

from __future__ import annotations

from enum import Enum

THINK_BEGIN = "<think>"
THINK_END = "</think>"


class ToolStyle(Enum):
    """A format of tool calls; the values are those of `--tool-call-parser`."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, SmolLM3."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": …, "parameters": {…}}` and nothing else, or after `<|python_tag|>`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or newer `[TOOL_CALLS]name{…}`."""
    PYTHONIC = "pythonic"
    """`[name(a=1, b="x"), …]`: Llama 3.2 and 4."""


class ReasoningStyle(Enum):
    """A format of reasoning; the values are those of `--reasoning-parser`."""

    THINK = "think"
    """`<think>…</think>` before the answer: DeepSeek-R1, Qwen3, SmolLM3."""


class ReasoningStart(Enum):
    """Where the output begins, as the prompt's end tells."""

    INSIDE = "inside"
    """The prompt ends in an open `<think>`: the output begins with reasoning."""
    POSSIBLE = "possible"
    """The output may begin with `<think>`."""
    OVER = "over"
    """The prompt holds the (empty) reasoning already: the output is the answer."""


TOOL_MARKERS: tuple[tuple[str, ToolStyle | None], ...] = (
    # Qwen3-Coder and GLM put XML, no JSON, between the tags that Hermes has.
    ("<function=", None),
    ("<arg_key>", None),
    ("<tool_call>", ToolStyle.HERMES),
    ("[TOOL_CALLS]", ToolStyle.MISTRAL),
    ("[func_name1(params_name1=", ToolStyle.PYTHONIC),
    ("<|python_start|>", ToolStyle.PYTHONIC),
    ("<|python_tag|>", ToolStyle.LLAMA3_JSON),
    ('{"name": function name, "parameters":', ToolStyle.LLAMA3_JSON),
)
"""The first that the template holds decides."""


def tool_style(flag: str, template: str) -> ToolStyle | None:
    """The format of tool calls for `--tool-call-parser flag`; None is none (or none known).

    `template` is the text of the chat template that renders tools; empty if there is none.
    """
    if flag == "none":
        return None
    if flag != "auto":
        return ToolStyle(flag)
    return next((style for marker, style in TOOL_MARKERS if marker in template), None)


def reasoning_style(flag: str, template: str) -> ReasoningStyle | None:
    """The format of reasoning for `--reasoning-parser flag`."""
    if flag == "none":
        return None
    if flag != "auto":
        return ReasoningStyle(flag)
    return ReasoningStyle.THINK if THINK_END in template else None


def reasoning_start(
    style: ReasoningStyle | None, prompt: str, continued: str | None
) -> ReasoningStart:
    """Where an output begins that follows `prompt`, the rendered text of the conversation.

    `continued` is the content of the last message if that one is continued
    (`continue_final_message`). Otherwise only the very end counts, which the template has written:
    what users wrote about `<think>` is nobody's reasoning.
    """
    if style is None:
        return ReasoningStart.OVER
    if continued is not None:
        begin, end = continued.rfind(THINK_BEGIN), continued.rfind(THINK_END)
        if begin == end == -1 and not continued.strip():
            return ReasoningStart.POSSIBLE
        return ReasoningStart.INSIDE if begin > end else ReasoningStart.OVER
    tail = prompt.rstrip()
    if tail.endswith(THINK_BEGIN):
        return ReasoningStart.INSIDE
    return ReasoningStart.OVER if tail.endswith(THINK_END) else ReasoningStart.POSSIBLE
