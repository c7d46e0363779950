"""How hard to try: few examples in the ordinary run, many with `./run test --all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

MORE = 50
"""Times as many examples with `--all`."""

Test = Callable[..., Any]


def efforts(examples: int) -> Callable[[Test], Test]:
    """Runs a test with `effort`: settings for what it draws."""
    return pytest.mark.parametrize(
        "effort",
        [
            pytest.param(_settings(examples), id="few"),
            pytest.param(_settings(MORE * examples), id="many", marks=pytest.mark.slow),
        ],
    )


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
