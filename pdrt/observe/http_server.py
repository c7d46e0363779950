"""uvicorn inside a loop of ours, as gateway and workers run it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class HttpServer(uvicorn.Server):
    """Signals and logs are its owner's; it speaks plain HTTP only."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        """`options`: further ones of `uvicorn.Config`."""
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                **options,
            )
        )
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
