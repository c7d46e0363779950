"""How hard to try: few examples in the ordinary run, many with `./run test --all`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MORE = 50
"""Times as many examples with `--all`."""

Test = Callable[..., Any]
Fuzz = Callable[[Callable[[Random], None]], None]


def efforts(examples: int) -> Callable[[Test], Test]:
    """Gives a test `fuzz`, which runs a function so often, each time with other randomness; the
    seed of what fails is printed."""
    return pytest.mark.parametrize(
        "fuzz",
        [
            pytest.param(_fuzz(examples), id="few"),
            pytest.param(_fuzz(MORE * examples), id="many", marks=pytest.mark.slow),
        ],
    )


def _fuzz(examples: int) -> Fuzz:
    def fuzz(try_one: Callable[[Random], None]) -> None:
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**64 - 1))
        def tried(seed: int) -> None:
            try_one(Random(seed))

        tried()

    return fuzz
