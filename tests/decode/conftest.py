"""The product's event loop, fast ticks, and no kill from inside the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop

from pdrt.transfer import worker_loop
from pdrt.transfer.processes import ProcessHandle
from tests.decode.deployment import Pair, deployed
from tests.transfer.copies import CopyGate


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "TICK_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(handle: ProcessHandle) -> None:
        raise AssertionError(f"a fence would have killed process {handle.pid}")

    monkeypatch.setattr(ProcessHandle, "kill", kill)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    gate = CopyGate(monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with deployed() as pair:
        yield pair
