"""Messages as chat templates want them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdrt.gateway.chat.bodies import Message, MessageToolCall
from pdrt.gateway.chat.json_text import decode_object
from pdrt.gateway.errors import invalid

TOOL_CALLS_MAX = 4096
"""Of all messages together; each costs a turn of the chat template."""
ARGUMENTS_BYTES_MAX = 1024 * 1024
"""Of all calls together: they become untyped objects, which are dear. It is more than most
contexts hold."""
KWARGS_BYTES_MAX = 4096
"""Variables are switches and words, never the conversation."""


def template_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Text parts are joined, `developer` is `system`, missing content is empty, the arguments of
    past calls are objects, a tool's answer knows its function's name.

    Raises:
        ApiError: 400 naming the message's field: content is missing, a field does not belong to
            the role, arguments are no JSON object.
    """
    calls = sum(len(message.tool_calls or ()) for message in messages)
    if calls > TOOL_CALLS_MAX:
        raise invalid(f"The messages hold {calls} tool calls; at most {TOOL_CALLS_MAX}", "messages")
    functions: dict[str, str] = {}
    bytes_left = ARGUMENTS_BYTES_MAX
    result = []
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        _check_role(message, param)
        fields: dict[str, Any] = {"role": message.role, "content": _content(message, param)}
        if message.role == "developer":
            fields["role"] = "system"
        if message.tool_calls:
            fields["tool_calls"] = _calls(message.tool_calls, bytes_left, f"{param}.tool_calls")
            bytes_left -= sum(len(call.function.arguments) for call in message.tool_calls)
            functions |= {call.id: call.function.name for call in message.tool_calls}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        name = message.name or functions.get(message.tool_call_id or "")
        if name is not None:
            fields["name"] = name
        result.append(fields)
    return tuple(result)


def template_kwargs(raw: bytes | None) -> dict[str, Any]:
    """`chat_template_kwargs`, decoded and bounded; `Tokenizer` checks the names.

    Raises:
        ApiError: 400 naming `chat_template_kwargs`.
    """
    return {} if raw is None else decode_object(raw, KWARGS_BYTES_MAX, "chat_template_kwargs")


def _check_role(message: Message, param: str) -> None:
    """What only one role may have."""
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid(f"Missing required field '{param}.tool_call_id'", f"{param}.tool_call_id")
    owners = {
        "tool_calls": ("assistant", message.tool_calls),
        "tool_call_id": ("tool", message.tool_call_id),
        "reasoning_content": ("assistant", message.reasoning_content),
        "reasoning": ("assistant", message.reasoning),
    }
    for name, (role, value) in owners.items():
        if value is not None and message.role != role:
            what = f"'{param}.{name}' is only for messages of the role '{role}'"
            raise invalid(what, f"{param}.{name}")


def _content(message: Message, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is not None:
        return "".join([part.text for part in content])
    if message.tool_calls or message.reasoning_content or message.reasoning:
        return ""  # templates add it to text, which null cannot be
    raise invalid(f"Missing required field '{param}.content'", f"{param}.content")


def _calls(calls: list[MessageToolCall], bytes_left: int, param: str) -> list[dict[str, Any]]:
    result = []
    for index, call in enumerate(calls):
        name = f"{param}[{index}].function.arguments"
        text = call.function.arguments
        # Clients send nothing for functions without arguments.
        arguments = decode_object(text, max(0, bytes_left), name) if text.strip() else {}
        bytes_left -= len(text)
        function = {"name": call.function.name, "arguments": arguments}
        result.append({"id": call.id, "type": "function", "function": function})
    return result
