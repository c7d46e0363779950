"""Bodies of OpenAI responses, whole and in chunks. Pure: the time is passed in."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class Usage(msgspec.Struct, frozen=True):
    """Exact token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChatFormat:
    """Bodies of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice("message", message, finish_reason)

    def first_choices(self) -> list[dict[str, Any]]:
        """What a stream begins with, before any text."""
        return [_choice("delta", {"role": "assistant", "content": ""}, None)]

    def text_choice(self, text: str) -> dict[str, Any]:
        return _choice("delta", {"content": text}, None)

    def last_choice(self, finish_reason: str) -> dict[str, Any]:
        return _choice("delta", {}, finish_reason)


class CompletionFormat:
    """Bodies of /v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        return _choice("text", text, finish_reason)

    def first_choices(self) -> list[dict[str, Any]]:
        return []

    def text_choice(self, text: str) -> dict[str, Any]:
        return _choice("text", text, None)

    def last_choice(self, finish_reason: str) -> dict[str, Any]:
        return _choice("text", "", finish_reason)


Format = ChatFormat | CompletionFormat


def _choice(key: str, value: object, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, key: value, "logprobs": None, "finish_reason": finish_reason}


class Bodies:
    """The bodies of one response."""

    def __init__(
        self, format: Format, id: str, created: int, model: str, include_usage: bool
    ) -> None:
        """`include_usage` is about chunks only."""
        self._format = format
        self._head = {"id": format.id_prefix + id, "created": created, "model": model}
        # Chunks of a stream that ends with its usage carry a null until then.
        self._no_usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        choices = [self._format.choice(text, finish_reason)]
        return _encoder.encode(
            {
                **self._head,
                "object": self._format.object,
                "choices": choices,
                "usage": usage.body(),
            }
        )

    def first(self) -> bytes:
        """Begins a stream; empty where the format has nothing to say yet."""
        return b"".join(self._chunk([choice]) for choice in self._format.first_choices())

    def text(self, text: str) -> bytes:
        return self._chunk([self._format.text_choice(text)])

    def last(self, finish_reason: str) -> bytes:
        return self._chunk([self._format.last_choice(finish_reason)])

    def usage(self, usage: Usage) -> bytes:
        return self._event({"choices": [], "usage": usage.body()})

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return self._event({"choices": choices, **self._no_usage})

    def _event(self, rest: dict[str, Any]) -> bytes:
        chunk = {**self._head, "object": self._format.chunk_object, **rest}
        return b"data: " + _encoder.encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Ends a stream that had begun: no `[DONE]`, no finish reason."""
    return b"event: error\ndata: " + error.body + b"\n\n"
