"""What every endpoint needs of HTTP: bodies within bounds, JSON, request ids, API keys."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrt.gateway.compression import too_large, unpack
from pdrt.gateway.errors import ApiError

log = logging.getLogger("pdrt.gateway")

BODY_SECONDS_MAX = 60.0
"""A client that sends its body slower than this holds a place that others could use."""
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Served without an API key: probes and scrapers have none."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body, unpacked.

    Raises:
        ApiError: 413 when it is larger than `bytes_max`, packed or not, 408 when it does not
            arrive, 400 when the client closed before its end or it cannot be unpacked, 415 when
            nobody here can.
    """
    length = request.headers.get("content-length", "")
    # Told beforehand, nothing needs to be read; the server has already refused what is no number.
    if length.isdecimal() and len(length) < 20 and int(length) > bytes_max:
        raise too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            async for chunk in request.stream():
                body += chunk
                if len(body) > bytes_max:
                    raise too_large(bytes_max)
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time") from None
    except ClientDisconnect:
        raise ApiError(400, "The client closed before the end of its body") from None
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return unpack(bytes(body), encoding, bytes_max)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JsonResponse(error.body, error.status, error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    headers = dict(error.headers or {})
    return JsonResponse(ApiError(error.status_code, message).body, error.status_code, headers)


async def on_bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback; the client learns only that it is not to blame."""
    return JsonResponse(ApiError(500, "Internal error", code="internal_error").body, 500)


class RequestIds:
    """Outermost: gives every request an id, the client's own if it sent a usable one, and
    returns it on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Request(scope).headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Refuses requests without one of the keys, all but those to `open_paths`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = dict(scope["headers"]).get(b"authorization", b"")
            # Every key is compared, so that the time says nothing about which one is nearly right.
            if not sum(hmac.compare_digest(given, expected) for expected in self._expected):
                message = "Missing or wrong API key; send it as 'Authorization: Bearer KEY'"
                error = ApiError(401, message, code="invalid_api_key")
                response = JsonResponse(error.body, error.status, error.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
