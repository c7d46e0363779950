"""Which styles a template tells of, where reasoning begins, and what comes out of it."""

from __future__ import annotations

import pytest

from pdrt.gateway.chat.styles import (
    ReasoningStart,
    ReasoningStyle,
    ToolStyle,
    reasoning_start,
    reasoning_style,
    tool_style,
)
from tests.gateway.chat.parsing import Answer, parse
from tests.model.templates import TEMPLATES

INSIDE, POSSIBLE, OVER = ReasoningStart.INSIDE, ReasoningStart.POSSIBLE, ReasoningStart.OVER


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (TEMPLATES["hermes"], ToolStyle.HERMES),
        (TEMPLATES["smollm3"], ToolStyle.HERMES),
        (TEMPLATES["llama31"], ToolStyle.LLAMA3_JSON),
        (TEMPLATES["mistral"], ToolStyle.MISTRAL),
        (TEMPLATES["r1"], None),
        ('{"name": function name, "parameters": …}', ToolStyle.LLAMA3_JSON),
        ("[func_name1(params_name1=params_value1, …)]", ToolStyle.PYTHONIC),
        ("<tool_call>\n<function=example>\n<parameter=", None),
        ("<tool_call>name\n<arg_key>", None),
        ("", None),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, style: ToolStyle | None) -> None:
    assert tool_style("auto", template) is style
    assert tool_style("none", template) is None
    assert tool_style("mistral", template) is ToolStyle.MISTRAL


def test_the_template_tells_whether_there_is_reasoning() -> None:
    for name, template in TEMPLATES.items():
        expected = ReasoningStyle.THINK if name in ("smollm3", "r1") else None
        assert reasoning_style("auto", template) is expected, name
        assert reasoning_style("none", template) is None
        assert reasoning_style("think", template) is ReasoningStyle.THINK


@pytest.mark.parametrize(
    ("prompt", "continued", "start"),
    [
        ("<|im_start|>assistant\n", None, POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", None, INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, OVER),
        ("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", None, POSSIBLE),
        ("…<think>I see", "<think>I see", INSIDE),
        ("…<think>I see</think>So", "<think>I see</think>So", OVER),
        ("…So", "So", OVER),
        ("…", "", POSSIBLE),
    ],
)
def test_where_the_output_begins(prompt: str, continued: str | None, start: ReasoningStart) -> None:
    assert reasoning_start(ReasoningStyle.THINK, prompt, continued) is start
    assert reasoning_start(None, prompt, continued) is OVER


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (POSSIBLE, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (POSSIBLE, " \n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (POSSIBLE, "Yes, <think>no</think>.", "", "Yes, <think>no</think>."),
        (POSSIBLE, "  <thin", "", "  <thin"),
        (POSSIBLE, "<think>", "", ""),
        (POSSIBLE, "<think>cut off <", "cut off <", ""),
        (POSSIBLE, "", "", ""),
        (INSIDE, "\nHm.\n\n</think>\n\nYes.", "Hm.\n", "Yes."),
        (INSIDE, "</think>Yes </think>.", "", "Yes </think>."),
        (INSIDE, "never ends\n", "never ends\n", ""),
        (OVER, "<think>Hm.</think>", "", "<think>Hm.</think>"),
    ],
)
def test_reasoning_is_told_from_the_answer(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    assert parse(None, [text], start) == Answer(content=content, reasoning=reasoning)


def test_a_call_that_is_only_thought_of_is_none() -> None:
    call = '<tool_call>{"name": "get_time"}</tool_call>'
    answer = parse("hermes", [f"<think>{call}</think>\n{call}"], POSSIBLE)
    assert (answer.reasoning, answer.calls, answer.content) == (call, [("get_time", {})], "")
