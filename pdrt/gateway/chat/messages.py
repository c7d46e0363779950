"""Messages as chat templates want them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdrt.gateway.chat.bodies import Message


def template_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Text parts are joined, `developer` is `system`, missing content is empty, the arguments of
    past calls are objects, a tool's answer knows its function's name.

    Raises:
        ApiError: 400 naming the message's field: content is missing, a field does not belong to
            the role, arguments are no JSON object.
    """
    return ()


def template_kwargs(raw: bytes | None) -> dict[str, Any]:
    """`chat_template_kwargs`, decoded and bounded; `Tokenizer` checks the names.

    Raises:
        ApiError: 400 naming `chat_template_kwargs`.
    """
    return {}
