"""A worker's own HTTP, as scrapers and probes see it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator

import httpx2
import pytest

from pdrt.errors import ConfigError
from pdrt.observe.worker_http import WorkerHttp


class Served:
    """An HTTP server whose answers the test sets."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.http = WorkerHttp(
            "127.0.0.1", 0, lambda: b"metric 1\n", lambda: self.reasons, lambda: b'{"rooms": 0}'
        )

    async def get(self, path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(trust_env=False, base_url=self.http.url) as client:
            return await client.get(path)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    running = asyncio.create_task(served.http.run())
    yield served
    running.cancel()
    async with asyncio.timeout(120):
        await asyncio.wait([running])


async def test_metrics(served: Served) -> None:
    response = await served.get("/metrics")
    assert response.content == b"metric 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_health_and_readiness(served: Served) -> None:
    assert (await served.get("/ready")).json() == {"ready": True, "reasons": []}
    served.reasons = ["leaving"]
    response = await served.get("/ready")
    assert (response.status_code, response.json()["reasons"]) == (503, ["leaving"])
    assert (await served.get("/health")).status_code == 200, "not ready is not dead"


async def test_status(served: Served) -> None:
    assert (await served.get("/status")).json() == {"rooms": 0}
    assert (await served.get("/nothing")).status_code == 404


async def test_port_in_use_names_the_flag(served: Served) -> None:
    port = int(served.http.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"{port}.*--metrics-port"):
        WorkerHttp("127.0.0.1", port, lambda: b"", lambda: [], lambda: b"")


async def test_cancelling_frees_the_port() -> None:
    served = Served()
    running = asyncio.create_task(served.http.run())
    await asyncio.sleep(0)
    running.cancel()
    async with asyncio.timeout(120):
        await asyncio.wait([running])
    port = int(served.http.url.rpartition(":")[2])
    again = WorkerHttp("127.0.0.1", port, lambda: b"", lambda: [], lambda: b"")
    again._socket.close()


async def test_it_leaves_signals_and_logs_to_the_worker(served: Served) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert (await served.get("/health")).status_code == 200
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not logging.getLogger("uvicorn").handlers, "the worker's own handler formats its lines"
