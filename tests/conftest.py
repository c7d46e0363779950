"""Hypothesis without deadlines: no test here asserts how long anything takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak", "tests/soak")
    group.addoption(
        "--soak-seconds", type=float, help="how long it lasts (default: two short epochs)"
    )
    group.addoption("--soak-model", help="a real one, in float32 (default: a tiny random one)")
    group.addoption(
        "--soak-report", type=Path, metavar="FILE", help="write what was seen here, as JSON"
    )
