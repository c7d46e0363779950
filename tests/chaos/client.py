"""One request over HTTP, and what came of it: an answer, an error with a reason, a connection that
broke; anything else is a request that was lost."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import httpx2
import msgspec

from tests.chaos.shapes import Answer, Shape, salted

HANG_SECONDS = 300.0
"""Nobody waits longer for anything. A bound on hangs, not a claim on speed."""
SMALL_BUFFER = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
BUSY = frozenset({429, 500, 502, 503, 504})
"""Errors of the server's: the client may come back."""


class Lost(Exception):
    """A client was let down; the text says how."""


class Refusal(msgspec.Struct, frozen=True):
    """An error that names a reason."""

    status: int
    """200: it came in mid-stream."""
    message: str
    retry_after_seconds: float


class Broken(msgspec.Struct, frozen=True):
    """The connection ended, as the client's library told it."""

    how: str


class Reading(msgspec.Struct, frozen=True):
    """How a client reads."""

    is_streamed: bool
    pause_seconds: float = 0.0
    """Once, in the middle of a stream, nothing is read for so long."""
    pause_after_events: int = 20


Result = Answer | Refusal | Broken


def new_http(is_slow: bool = False) -> httpx2.AsyncClient:
    """To be closed by the caller. A slow one has hardly any buffer of its own."""
    limits = httpx2.Limits(max_connections=None)
    options = SMALL_BUFFER if is_slow else None
    transport = httpx2.AsyncHTTPTransport(limits=limits, socket_options=options)
    return httpx2.AsyncClient(transport=transport, timeout=HANG_SECONDS, trust_env=False)


async def ask(
    http: httpx2.AsyncClient, url: str, shape: Shape, reading: Reading, dice: random.Random
) -> Result:
    """Raises Lost."""
    body = salted(shape, dice)
    if reading.is_streamed:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", url + shape.path, json=body) as response:
            if response.status_code != 200:
                return _refusal(response, await response.aread())
            if not reading.is_streamed:
                return _whole(json.loads(await response.aread()))
            return await _events(response, shape, reading)
    except httpx2.TimeoutException as error:
        raise Lost(f"{shape.name}: nothing for {HANG_SECONDS} s ({error!r})") from error
    except httpx2.TransportError as error:
        return Broken(repr(error))


def _refusal(response: httpx2.Response, data: bytes) -> Refusal:
    status = response.status_code
    try:
        message = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise Lost(f"status {status} without a reason: {data[:200]!r}") from None
    if status not in BUSY or not message:
        raise Lost(f"status {status} for a good request: {message!r}")
    return Refusal(status, message, float(response.headers.get("retry-after", 0)))


def _whole(body: dict[str, Any]) -> Answer:
    choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
    texts = (c["text"] if "text" in c else c["message"]["content"] for c in choices)
    reasons = tuple(choice["finish_reason"] for choice in choices)
    usage = body["usage"]
    return Answer(tuple(texts), reasons, usage["prompt_tokens"], usage["completion_tokens"])


async def _events(response: httpx2.Response, shape: Shape, reading: Reading) -> Answer | Refusal:
    """A stream to its end: every choice finished, then the usage, then `[DONE]`."""
    events = Events(shape.choices)
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            events.take(line.removeprefix("data: "))
        if events.count == reading.pause_after_events and reading.pause_seconds:
            events.count += 1
            await asyncio.sleep(reading.pause_seconds)
    return events.end()


class Events:
    """The events of one stream. Methods raise Lost where they are not what they must be."""

    def __init__(self, choices: int) -> None:
        self.count = 0
        self._texts = [""] * choices
        self._reasons: list[str | None] = [None] * choices
        self._usage: dict[str, int] | None = None
        self._error: str | None = None
        self._is_done = False

    def take(self, data: str) -> None:
        """What follows `data: `."""
        self.count += 1
        if self._is_done or self._error is not None:
            raise Lost(f"an event after the end: {data[:200]}")
        if data == "[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self._error = event["error"]["message"]
            return
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = int(choice["index"])
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        if self._reasons[index] is not None:
            raise Lost(f"choice {index} goes on after its end")
        self._texts[index] += text or ""
        self._reasons[index] = choice["finish_reason"]

    def end(self) -> Answer | Refusal:
        """The connection has ended well."""
        if self._error is not None:
            if not self._error:
                raise Lost("an error without a reason")
            return Refusal(200, self._error, 0.0)
        reasons = tuple(reason for reason in self._reasons if reason is not None)
        if not self._is_done or self._usage is None or len(reasons) < len(self._reasons):
            raise Lost(f"cut off after {self.count} events, without an error")
        usage = self._usage
        return Answer(
            tuple(self._texts), reasons, usage["prompt_tokens"], usage["completion_tokens"]
        )
