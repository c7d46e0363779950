"""A worker's own HTTP: /metrics, /health, /ready, /status. For scrapers and probes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdrt.errors import ConfigError
from pdrt.observe.http_server import HttpServer


class WorkerHttp:
    """Bound at once, serving while `run` runs."""

    def __init__(
        self,
        host: str,
        port: int,
        render: Callable[[], bytes],
        reasons: Callable[[], list[str]],
        status: Callable[[], bytes],
    ) -> None:
        """`render`: Prometheus text. `reasons`: why the worker is not ready, empty when it is.
        `status`: a JSON object.

        Raises:
            ConfigError: the port cannot be bound.
        """

        async def metrics(_: Request) -> Response:
            return Response(render(), media_type="text/plain; version=0.0.4")

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "alive"})

        async def ready(_: Request) -> Response:
            why = reasons()
            return JSONResponse({"ready": not why, "reasons": why}, 503 if why else 200)

        async def show_status(_: Request) -> Response:
            return Response(status(), media_type="application/json")

        routes = [
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/ready", ready),
            Route("/status", show_status),
        ]
        self._socket = socket.socket(socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot bind to {host}:{port} ({error.strerror}); choose another --metrics-port"
            ) from error
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._server = HttpServer(Starlette(routes=routes))

    async def run(self) -> None:
        """Serve until cancelled or closed."""
        try:
            await self._server.serve(sockets=[self._socket])
        except asyncio.CancelledError:
            self._server.force_exit = True
            raise
        finally:
            self._socket.close()
