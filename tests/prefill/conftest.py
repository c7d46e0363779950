"""The product's event loop, and fast ticks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from pdrt.transfer import worker_loop
from tests.prefill.peer import DecodePeer, Prefill


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "TICK_SECONDS", 0.01)


@pytest.fixture
async def prefill() -> AsyncIterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.executor.gate.set()
    await prefill.deployment.quiet()
    await prefill.deployment.close()
    for peer in prefill.peers:
        peer.close()


@pytest.fixture
async def peer(prefill: Prefill) -> DecodePeer:
    peer = prefill.peer()
    assert (await peer.hello()).refusal is None
    return peer
