"""The product's event loop, and copies that can be held back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.transfer.copies import CopyGate


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    gate = CopyGate(monkeypatch)
    yield gate
    gate.open()
