"""Messages become what chat templates want; what they cannot be is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdrt.gateway.chat.bodies import Message
from pdrt.gateway.chat.messages import (
    ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_MAX,
    template_kwargs,
    template_messages,
)
from pdrt.gateway.errors import ApiError


def converted(*messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return template_messages(msgspec.json.decode(msgspec.json.encode(messages), type=list[Message]))


def call(arguments: str, call_id: str = "call_1", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert converted(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning": "Hm."},
    ) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
    )


def test_calls_and_their_answers() -> None:
    """As clients of OpenAI's library send answers back."""
    answer = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [{**call('{"a": [1]}'), "index": 0}, call("", "2")],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    assert converted(answer, result) == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"a": [1]}},
                },
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {**result, "name": "f"},
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "tool_calls"),
        ({"role": "system", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "reasoning"),
    ],
)
def test_fields_that_are_missing_or_misplaced(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        converted({"role": "user", "content": "hi"}, message)
    assert (refused.value.status, refused.value.param) == (400, f"messages[1].{param}")


@pytest.mark.parametrize("text", ["{", "[]", "3", '"{}"', "{} {}", '{"a": ' * 70 + "1" + "}" * 70])
def test_arguments_that_are_no_object(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        converted({"role": "assistant", "tool_calls": [call("{}"), call(text)]})
    assert refused.value.param == "messages[0].tool_calls[1].function.arguments"


def test_arguments_in_bounds_all_together() -> None:
    half = '{"a": "' + "x" * (ARGUMENTS_BYTES_MAX // 2 - 20) + '"}'
    message = {"role": "assistant", "tool_calls": [call(half)]}
    assert len(converted(message, message)) == 2
    with pytest.raises(ApiError) as refused:
        converted(message, message, message)
    assert refused.value.param == "messages[2].tool_calls[0].function.arguments"


def test_calls_in_bounds_all_together() -> None:
    message = {"role": "assistant", "tool_calls": [call("{}")] * (TOOL_CALLS_MAX // 2 + 1)}
    with pytest.raises(ApiError) as refused:
        converted(message, message)
    assert refused.value.param == "messages"


def test_template_variables() -> None:
    assert template_kwargs(None) == {}
    assert template_kwargs(b'{"enable_thinking": false}') == {"enable_thinking": False}
    for hostile in (
        b"[]",
        b'"x"',
        b'{"a": "' + b"x" * 4096 + b'"}',
        b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    ):
        with pytest.raises(ApiError) as refused:
            template_kwargs(hostile)
        assert refused.value.param == "chat_template_kwargs"
