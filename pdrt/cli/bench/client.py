"""One streamed request to an OpenAI-compatible endpoint, and when each piece of it came.

HTTP by hand: a client library's own work per event would be part of the figures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from pdrt.errors import ConfigError

LINE_BYTES_MAX = 1024 * 1024
"""Of one event."""
CHUNK_BYTES_MAX = 16 * 1024 * 1024
ERROR_BYTES_MAX = 2000
"""Of an error's body that are read."""


class Target(msgspec.Struct, frozen=True):
    """Where requests go."""

    host: str
    port: int
    path: str
    """Of the API: `/v1` or what stands in its place."""
    is_https: bool
    api_key: str | None
    kind: Literal["completions", "chat"]
    seconds_max: float
    """Of one request."""


class Sample(msgspec.Struct, frozen=True):
    """One request. Times are of one clock, in seconds."""

    sent_at: float
    ended_at: float
    times: tuple[float, ...] = ()
    """When each event with text came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the endpoint counted them; the number of events where it did not say."""
    cached_tokens: int = 0
    """Of the prompt, found in a prefix cache, where the endpoint says so."""
    error: str | None = None
    """Why it failed, in words."""

    @property
    def ttft(self) -> float:
        """Time to first token. Only of those that did not fail."""
        return self.times[0] - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None when there is no second."""
        if self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)


def parse_target(
    url: str, api_key: str | None, kind: Literal["completions", "chat"], seconds_max: float
) -> Target:
    """Raises `ConfigError` if `url` is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is not an http:// or https:// address")
    is_https = parts.scheme == "https"
    path = parts.path.rstrip("/")
    return Target(
        host=parts.hostname,
        port=port or (443 if is_https else 80),
        path=path if path.endswith("/v1") else path + "/v1",
        is_https=is_https,
        api_key=api_key,
        kind=kind,
        seconds_max=seconds_max,
    )


async def send(target: Target, body: dict[str, Any]) -> Sample:
    """Send one request over a fresh connection. Failures are samples too."""
    sent_at = time.perf_counter()
    events = _Events()
    error: str | None = None
    try:
        async with asyncio.timeout(target.seconds_max):
            await _stream(target, body, events)
    except TimeoutError:
        error = "timeout"
    except _Failed as failure:
        error = str(failure)
    except (OSError, EOFError, ValueError) as failure:
        error = type(failure).__name__
    if error is None and not events.times:
        error = "no text"
    return Sample(
        sent_at=sent_at,
        ended_at=time.perf_counter(),
        times=tuple(events.times),
        prompt_tokens=events.prompt_tokens,
        output_tokens=events.output_tokens or len(events.times),
        cached_tokens=events.cached_tokens,
        error=error,
    )


class _Failed(Exception):
    """The endpoint said so."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    """What of an event is looked at."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class _Events:
    """What has come so far."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0

    def take(self, data: bytes) -> None:
        """One event's JSON."""
        now = time.perf_counter()
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event that is no object")
        if "error" in event:
            raise _Failed(_error_name(event))
        try:
            chunk = msgspec.convert(event, _Chunk)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        for choice in chunk.choices or ():
            delta = choice.delta or _Delta()
            if choice.text or delta.content or delta.reasoning_content:
                self.times.append(now)
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens or 0
            self.output_tokens = chunk.usage.completion_tokens or 0
            details = chunk.usage.prompt_tokens_details or _PromptDetails()
            self.cached_tokens = details.cached_tokens or 0


async def _stream(target: Target, body: dict[str, Any], events: _Events) -> None:
    context = ssl.create_default_context() if target.is_https else None
    reader, writer = await asyncio.open_connection(
        target.host, target.port, ssl=context, limit=LINE_BYTES_MAX
    )
    try:
        resource = "/chat/completions" if target.kind == "chat" else "/completions"
        writer.write(request_bytes(target, "POST", resource, json.dumps(body).encode()))
        status, headers = await _head(reader)
        if status != 200:
            raise _Failed(await _refusal(reader, status))
        async for line in _lines(reader, "chunked" in headers.get("transfer-encoding", "")):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                events.take(data)
    finally:
        writer.close()


def request_bytes(target: Target, method: str, resource: str, body: bytes) -> bytes:
    """An HTTP/1.1 request that closes its connection."""
    lines = [
        f"{method} {target.path}{resource} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case."""
    words = (await reader.readline()).split()
    if len(words) < 2:
        raise EOFError("no answer")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) and len(headers) < 100:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(words[1]), headers


async def _refusal(reader: asyncio.StreamReader, status: int) -> str:
    text = await reader.read(ERROR_BYTES_MAX)
    try:
        return f"{status} {_error_name(json.loads(text[text.index(b'{') : text.rindex(b'}') + 1]))}"
    except ValueError:
        return str(status)


def _error_name(event: dict[str, Any]) -> str:
    error = event.get("error")
    if not isinstance(error, dict):
        return "error"
    return str(error.get("code") or error.get("type") or "error")[:80]


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """Lines of the body, which ends with the connection or with its last chunk."""
    if not is_chunked:
        while line := await reader.readline():
            yield line
        return
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        if size > CHUNK_BYTES_MAX:
            raise ValueError("a chunk that is too large")
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES_MAX:
            raise ValueError("a line that is too long")
    if rest:
        yield rest
