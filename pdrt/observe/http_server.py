"""uvicorn inside a loop of ours, as gateway and workers run it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_BYTES_MAX = 64 * 1024
"""Of a request's head, of its trailers, or of anything else between two pieces of body."""
ACCEPTED_PER_TURN = 8
"""Connections. libuv accepts one per watcher and turn of the loop (since 1.45), and while hundreds
of streams are written to a turn is long: a burst of clients would come in one per decode step.
More would hold up the streams: each brings a request that takes about a millisecond to begin."""

DIRECT_BODY = "pdrt.direct_body"
"""Name of the `DirectBody` among a scope's extensions."""


class _Outbox:
    """Writes what many connections are sent in one turn of the loop at the end of it, one right
    after the other: a write costs half as much then, as its code stays in the processor's caches
    and the clients stay awake."""

    def __init__(self) -> None:
        self._waiting: list[DirectBody] = []

    def add(self, body: DirectBody) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(body)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for body in waiting:
            body.flush()


class DirectBody:
    """Pieces of a body on the shortest way to the connection: what the server's `send` does with
    one when it need not wait. A stream of tokens goes this way: the layers around an application
    wrap `send` half a dozen times, which costs more than all else, and look at no body that
    comes in pieces. One that does must take this out of the scope."""

    def __init__(self, cycle: RequestResponseCycle, outbox: _Outbox) -> None:
        self._cycle = cycle
        self._outbox = outbox
        self._waiting = b""

    @property
    def is_open(self) -> bool:
        """The response has begun, in pieces, its client is there, and takes what is sent."""
        cycle = self._cycle
        is_over = cycle.response_complete or cycle.disconnected
        return bool(cycle.chunked_encoding) and not is_over and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """One piece, not empty, while it `is_open`. More follows: the end goes by `send`, after a
        `flush`."""
        if not self._waiting:
            self._outbox.add(self)
        self._waiting += b"%x\r\n%b\r\n" % (len(data), data)

    def flush(self) -> None:
        """Write now what waits for the end of this turn of the loop."""
        data, self._waiting = self._waiting, b""
        if data and not self._cycle.transport.is_closing():
            self._cycle.transport.write(data)


class _Http(HttpToolsProtocol):
    """uvicorn on httptools, which is half again as fast as on h11, but collects an endless head
    until memory runs out."""

    _quiet_bytes = 0
    """Received since the parser last had something for us. Up to one read more than that."""

    def __init__(self, outbox: _Outbox, **options: Any) -> None:
        """`outbox`: of its server; `options` are uvicorn's."""
        super().__init__(**options)
        self._outbox = outbox

    def data_received(self, data: bytes) -> None:
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response(f"More than {HEAD_BYTES_MAX} bytes of headers.")

    def on_headers_complete(self) -> None:
        self._quiet_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            direct = DirectBody(self.cycle, self._outbox)
            self.scope["extensions"] = {DIRECT_BODY: direct}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._quiet_bytes = 0
        super().on_message_complete()


class HttpServer(uvicorn.Server):
    """Signals and logs are its owner's; it speaks plain HTTP only."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        """`options`: further ones of `uvicorn.Config`."""
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http=functools.partial(_Http, _Outbox()),  # type: ignore[arg-type]
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                **options,
            )
        )
        self.accepting = asyncio.Event()
        self.servers = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """`sockets`: bound ones; they are closed at the end."""
        copies = [each.dup() for each in sockets or () for _ in range(ACCEPTED_PER_TURN - 1)]
        try:
            await super().serve(sockets and [*sockets, *copies])
        finally:
            # Cancelled, it has not come to this. uvloop would keep the listeners open; asyncio
            # would go on watching their numbers, and not what gets these next.
            for server in self.servers:
                server.close()
            for copy in copies:
                copy.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
