"""One grammar for all that constrains an output. Pure.

Parts are xgrammar's formats, the JSON that structural tags are made of; see its documentation of
`StructuralTag`. They are strings of text, so it does not matter whether a marker is one token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.gateway.chat.json_text import encode
from pdrt.gateway.chat.styles import THINK_BEGIN, THINK_END, ReasoningStart, ToolStyle
from pdrt.gateway.chat.tools import ToolPlan
from pdrt.gateway.errors import invalid
from pdrt.sampling import Grammar, GrammarKind

Format = dict[str, Any]


class Frame(msgspec.Struct, frozen=True):
    """What stands around the name and the arguments of a call."""

    before: str
    """Before the first call."""
    begin: str
    """Before the name."""
    middle: str
    """Between name and arguments."""
    end: str
    """After the arguments."""
    separator: str
    """Between calls."""
    after: str
    """After the last call."""


FRAMES = {
    ToolStyle.HERMES: Frame(
        "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", ""
    ),
    ToolStyle.LLAMA3_JSON: Frame("", '{"name": "', '", "parameters": ', "}", "; ", ""),
    ToolStyle.MISTRAL: Frame("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]"),
}
"""None for Python-like calls: `plan_tools` sees to it that none is asked for."""
TRIGGERS = {
    ToolStyle.HERMES: "<tool_call>",
    ToolStyle.LLAMA3_JSON: '{"name": "',
    ToolStyle.MISTRAL: "[TOOL_CALLS]",
}
"""What begins a call in free text."""


WHITESPACE_CHARACTERS = 16
"""Between two parts of a JSON text at most: a model that has lost its thread would go on with
newlines until the end. Enough for any usual indentation."""


def output_grammar(
    response: Grammar | None, plan: ToolPlan, start: ReasoningStart, grammar_bytes_max: int
) -> Grammar | None:
    """The grammar of the whole output, for `Sampling.grammar`.

    Reasoning comes first and is free. Then forced calls alone; or, where the model may choose,
    either calls or an answer in the response format.

    Raises:
        ApiError: 400: all together are larger than `grammar_bytes_max`, or the model's calls and a
            response format cannot be told apart.
    """
    if plan.style is None:
        if response is None or start is ReasoningStart.OVER:
            return response
        format = format_of(response)
    elif plan.forced:
        format = calls_format(plan)
    elif response is not None:
        if plan.style is ToolStyle.PYTHONIC:
            message = "this model writes calls as Python, which excludes a response format"
            raise invalid(message, "response_format")
        format = {"type": "or", "elements": [calls_format(plan), format_of(response)]}
    elif plan.strict:
        format = free_format(plan)
    else:
        return None
    text = encode({"type": "structural_tag", "format": after_reasoning(format, start)})
    if len(text.encode()) > grammar_bytes_max:
        message = f"The schemas make a grammar larger than {grammar_bytes_max} bytes"
        raise invalid(message, "response_format" if plan.style is None else "tools")
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def format_of(grammar: Grammar) -> Format:
    """A grammar as a part of a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return _json(msgspec.json.decode(grammar.text))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            format: Format = msgspec.json.decode(grammar.text)["format"]
            return format


def calls_format(plan: ToolPlan) -> Format:
    """One call or more of `plan`'s functions, and nothing else."""
    frame = _frame(plan)
    calls = _calls(plan, frame)
    if not frame.before:
        return calls
    return {
        "type": "sequence",
        "elements": [_constant(frame.before), calls, _constant(frame.after)],
    }


def free_format(plan: ToolPlan) -> Format:
    """Any text, but calls in it are of `plan`'s functions and obey their schemas."""
    frame = _frame(plan)
    calls = _calls(plan, frame)
    tags = calls["tags"]
    if frame.before:
        # All calls stand in one pair of brackets.
        tags = [{"type": "tag", "begin": frame.before, "content": calls, "end": frame.after}]
    assert plan.style is not None
    return {
        "type": "triggered_tags",
        "triggers": [TRIGGERS[plan.style]],
        "tags": tags,
        "stop_after_first": plan.calls_max == 1 or bool(frame.before),
    }


def after_reasoning(format: Format, start: ReasoningStart) -> Format:
    """`format`, with reasoning before it where the output may begin with some."""
    if start is ReasoningStart.OVER:
        return format
    begin = "" if start is ReasoningStart.INSIDE else THINK_BEGIN
    reasoning: Format = {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THINK_END},
            {"type": "regex", "pattern": "\\n{0,2}"},
        ],
    }
    if start is ReasoningStart.POSSIBLE:
        reasoning = {"type": "optional", "content": reasoning}
    return {"type": "sequence", "elements": [reasoning, format]}


def _frame(plan: ToolPlan) -> Frame:
    assert plan.style in FRAMES, "no schema can be imposed on this model's calls"
    assert plan.schemas, "there is nothing to call"
    return FRAMES[plan.style]


def _calls(plan: ToolPlan, frame: Frame) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": frame.begin + name + frame.middle,
                "content": _json(schema),
                "end": frame.end,
            }
            for name, schema in plan.schemas
        ],
        "separator": frame.separator,
        "at_least_one": True,
        "stop_after_first": plan.calls_max == 1,
    }


def _json(schema: dict[str, Any]) -> Format:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": WHITESPACE_CHARACTERS,
    }


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}
