"""Refusals as OpenAI clients expect them. Pure."""

from __future__ import annotations

import msgspec

MESSAGE_CHARACTERS_MAX = 1000
"""Of an error: enough for any sentence of ours, and no copy of what was sent."""


class ApiError(Exception):
    """Ends an HTTP request with a status and an OpenAI error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # Libraries quote what they refuse, however long it is.
        is_long = len(message) > MESSAGE_CHARACTERS_MAX
        self.message = f"{message[:MESSAGE_CHARACTERS_MAX]}…" if is_long else message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> bytes:
        """The JSON error object."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _type_of(self.status),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(self.retry_after_seconds)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400, naming the field."""
    return ApiError(400, message, param=param, code=code)


def context_length_exceeded(tokens: int | str, tokens_max: int, param: str) -> ApiError:
    """400 for a prompt (or prompt and output) that the model cannot hold."""
    return invalid(
        f"This model's maximum context length is {tokens_max} tokens, "
        f"but the request asks for {tokens}.",
        param,
        "context_length_exceeded",
    )


def unavailable(message: str, retry_after_seconds: int = 1) -> ApiError:
    """503; the client may come back."""
    return ApiError(503, message, code="unavailable", retry_after_seconds=retry_after_seconds)


def overloaded(message: str) -> ApiError:
    """429; the client may come back."""
    return ApiError(429, message, code="overloaded", retry_after_seconds=1)
