"""The product's event loop, and fast ticks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from pdrt.transfer import worker_loop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "TICK_SECONDS", 0.01)
