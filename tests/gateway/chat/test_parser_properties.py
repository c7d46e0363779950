"""Whatever a model writes and however it is cut: nothing raises, nothing is lost, nothing grows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.gateway.chat.parser import Parser
from pdrt.gateway.chat.reader import HELD_CHARACTERS_MAX
from pdrt.gateway.chat.styles import ReasoningStart
from tests.gateway.chat.parsing import NAMES, Answer, make_parser, parse

STYLES = ["hermes", "llama3_json", "mistral", "pythonic"]
STARTS = list(ReasoningStart)

FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]",
            "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<think>", "</think>", "\n",
            '{"name": "get_time", "arguments": {', '{"name": "get_time", "parameters": {}}',
            '{"arguments": {"a": 1}, "name": "get_time"}', "get_time{", "[get_time(a=",
            "get_time()",
            "[", "]", "{", "}", '"', "'", '"""', ",", ";", ":", "=", "(", ")", "\\", "\\u12",
            "\\ud83d",
            '"a": ', "1.5e-3", "true", "None", " ", "\t", "日本", "👩‍👩‍👧", "\x00", "-", "0",
        ]
    ),
    st.text(max_size=5),
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(KEYS, JSON, max_size=4)),
    min_size=1,
    max_size=3,
)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("style", [*STYLES, None])
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(FRAGMENTS, max_size=16), cuts=CUTS, start=st.sampled_from(STARTS))
def test_cuts_do_not_matter_and_nothing_is_lost(
    style: str | None, parts: list[str], cuts: list[int], start: ReasoningStart
) -> None:
    text = "".join(parts)
    whole = parse(style, [text], start)
    assert parse(style, cut(text, cuts), start) == whole
    assert parse(style, list(text), start) == whole
    if not whole.names and start is ReasoningStart.OVER:
        assert whole.content == text
    if style is None:
        assert not whole.names


def in_hermes(calls: list[tuple[str, dict[str, Any]]], dumps: Callable[[Any], str]) -> str:
    return "\n".join(
        f"<tool_call>\n{dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def in_llama(calls: list[tuple[str, dict[str, Any]]], dumps: Callable[[Any], str]) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def in_mistral(calls: list[tuple[str, dict[str, Any]]], dumps: Callable[[Any], str]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{dumps(listed)}"


def in_new_mistral(calls: list[tuple[str, dict[str, Any]]], dumps: Callable[[Any], str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def in_python(calls: list[tuple[str, dict[str, Any]]], _: Callable[[Any], str]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


@pytest.mark.parametrize(
    ("style", "write"),
    [
        ("hermes", in_hermes),
        ("llama3_json", in_llama),
        ("mistral", in_mistral),
        ("mistral", in_new_mistral),
        ("pythonic", in_python),
    ],
)
@settings(max_examples=150, deadline=None)
@given(
    calls=CALLS,
    cuts=CUTS,
    layout=st.fixed_dictionaries(
        {"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, 2])}
    ),
    thought=st.sampled_from(["", "<think>\nHm, <tool_call>?\n</think>\n\n"]),
)
def test_calls_come_out_as_they_were_meant(  # noqa: PLR0913, PLR0917 (drawn)
    style: str, write: Any, calls: Any, cuts: list[int], layout: dict[str, Any], thought: str
) -> None:
    def dumps(value: Any) -> str:
        return json.dumps(value, **layout)

    text = thought + write(calls, dumps)
    answer = parse(style, cut(text, cuts), ReasoningStart.POSSIBLE)
    assert answer.calls == calls
    assert answer.content == ""
    assert answer.reasoning == ("Hm, <tool_call>?" if thought else "")


LONG = 100_000
ARGUMENTS = '<tool_call>{"name": "f", "arguments": {"a": '
HOSTILE = {
    "arguments of one string": ARGUMENTS + '"' + "x" * LONG + '"}}',
    "arguments of escapes": ARGUMENTS + '"' + "\\n" * (LONG // 2) + '"}}',
    "arguments of many items": ARGUMENTS + "[" + "1," * (LONG // 2) + "1]}}",
    "an endless name": '<tool_call>{"name": "' + "x" * LONG,
    "endless space": "<tool_call>" + " " * LONG,
    "an endless number": ARGUMENTS + "1" * LONG,
    "many markers": "<tool_call>" * (LONG // 11),
    "many half markers": "<tool_cal" * (LONG // 9),
    "many empty calls": '<tool_call>{"name":"f"}</tool_call>' * (LONG // 35),
    "arguments before the name": '<tool_call>{"arguments": {"a": "' + "x" * LONG + '"}, "name": 1}',
    "depth": ARGUMENTS + "[" * LONG,
    "python": "[get_time(a='" + "x" * LONG + "', b=[" + "1, " * (LONG // 3) + "])]",
    "depth of python": "[get_time(a=" + "[" * LONG,
    "parentheses": "[get_time(a=(" + "1, " * (LONG // 3) + "))]",
    "blank answer": " " * LONG,
    "thoughts": "<think>" + "\n</thin" * (LONG // 7),
    "only json": '{"name": "' + "x" * LONG,
}


def parsers_of(output: Any) -> list[Parser]:
    return [parser for parser in (output._reasoning, output._calls) if parser is not None]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_long_outputs_are_held_in_bounds(style: str, name: str) -> None:
    """Token by token: what is held and what is copied per token has a bound."""
    text = HOSTILE[name]
    output = make_parser(style, ReasoningStart.POSSIBLE)
    answer = Answer()
    for at in range(0, len(text), 5):
        answer.add(output.push(text[at : at + 5]))
        for parser in parsers_of(output):
            reader = parser._reader
            assert 0 <= reader._room <= HELD_CHARACTERS_MAX
            assert len(reader._text) - reader._at < 32, "unread text is copied at the next push"
    for parser in parsers_of(output):
        reader = parser._reader
        assert sum(map(len, reader._held)) == HELD_CHARACTERS_MAX - reader._room
    answer.add(output.finish())
    assert parse(style, [text], ReasoningStart.POSSIBLE) == answer
    if style == "hermes" and name.startswith("arguments of"):
        assert len(answer.calls) == 1


def work(style: str, text: str) -> int:
    """Functions called for `text`, token by token: a measure of time that does not vary."""
    output = make_parser(style, ReasoningStart.POSSIBLE)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), 5):
            output.push(text[at : at + 5])
        output.finish()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("style", ["hermes", "pythonic"])
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_work_grows_with_the_text_and_no_faster(style: str, name: str) -> None:
    text = HOSTILE[name]
    short, long = (work(style, text[:size]) for size in (10_000, 20_000))
    assert long <= 2.2 * short + 2_000
