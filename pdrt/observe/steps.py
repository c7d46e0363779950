"""When a forward has been running for so long that its worker cannot be called healthy."""

from __future__ import annotations

STEP_SECONDS_MAX = 60.0
"""A forward that takes longer makes the worker unhealthy until it returns."""


def step_complaints(step_age: float) -> list[str]:
    """Of a forward that has been running for `step_age` seconds; empty when all is well."""
    if step_age <= STEP_SECONDS_MAX:
        return []
    return [f"a forward has been running for {step_age:.0f} s"]
