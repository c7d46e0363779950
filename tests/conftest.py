"""Hypothesis without deadlines: no test here asserts how long anything takes. And the product's
event loop, for tests that are not coroutines themselves. What an exporter of spans says in threads
that outlive their test is not found in another one's log."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
logging.getLogger("opentelemetry").propagate = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak", "tests/soak")
    group.addoption(
        "--soak-seconds", type=float, help="how long it lasts (default: two short epochs)"
    )
    group.addoption("--soak-model", help="a real one, in float32 (default: a tiny random one)")
    group.addoption(
        "--soak-report", type=Path, metavar="FILE", help="write what was seen here, as JSON"
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner
