"""The product's event loop, and how often the tests of growth do what must leave nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def unlogged() -> Iterator[None]:
    """pytest would keep every line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=[100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def times(request: pytest.FixtureRequest) -> int:
    return int(request.param)
