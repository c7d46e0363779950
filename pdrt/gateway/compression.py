"""gzip: bodies of requests that are packed, and of answers for clients that take it."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrt.gateway.errors import ApiError, invalid

PACKED_BYTES_MIN = 1024
"""Less is one packet as it is."""
LEVEL = 1
"""JSON shrinks to a fifth at 100 MB/s; more effort buys little."""
INLINE_BYTES_MAX = 64 * 1024
"""More is packed in a thread, beside the loop."""
GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS
"""What tells zlib to expect gzip's head."""


def unpack(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """The body of a request with this `content-encoding`; never more than `bytes_max` in memory.

    Raises:
        ApiError: 415 for another encoding than gzip, 413 when it is larger, 400 when it is broken.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip"):
        message = f"Content-Encoding '{encoding[:40]}' is not supported; send gzip or none"
        raise ApiError(415, message, param="Content-Encoding")
    packed = zlib.decompressobj(GZIP_WINDOW_BITS)
    try:
        unpacked = packed.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise invalid(f"The body is no gzip: {error}", "Content-Encoding") from None
    if len(unpacked) > bytes_max:
        raise too_large(bytes_max)
    if not packed.eof or packed.unused_data:
        raise invalid("The body is not one whole gzip member", "Content-Encoding")
    return unpacked


def too_large(bytes_max: int) -> ApiError:
    return ApiError(413, f"The body is larger than {bytes_max} bytes", code="body_too_large")


def takes_gzip(headers: Mapping[str, str]) -> bool:
    """Whether `accept-encoding` names it, and not with a weight of 0."""
    for item in headers.get("accept-encoding", "").lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


class Compression:
    """Packs answers that come in one piece. Streams pass as they are: each event must arrive at
    once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not takes_gzip(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def send_packed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                begun, start = start, None
                message = await _packed(begun, message)
                await send(begun)
            await send(message)

        await self._app(scope, receive, send_packed)


async def _packed(start: Message, message: Message) -> Message:
    """The body, packed if that is worth it; `start` is changed to say so."""
    headers = MutableHeaders(raw=start["headers"])
    body: bytes = message.get("body", b"")
    if message.get("more_body") or "content-encoding" in headers:
        return message
    headers.add_vary_header("Accept-Encoding")
    if len(body) >= PACKED_BYTES_MIN:
        if len(body) <= INLINE_BYTES_MAX:
            body = gzip.compress(body, LEVEL, mtime=0)
        else:
            body = await asyncio.to_thread(gzip.compress, body, LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
        headers["content-length"] = str(len(body))
    start["headers"] = headers.raw
    return {**message, "body": body}
