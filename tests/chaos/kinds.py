"""What a fault is: done to one process or host, and undone."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import msgspec

from tests.chaos.cluster import SILENCE_SECONDS, Cluster

Heal = Callable[[], Awaitable[None]]
Fault = Callable[[Cluster, str, random.Random], Heal]
SHORT_SECONDS = SILENCE_SECONDS / 8
LONG_SECONDS = SILENCE_SECONDS * 1.5


class Kind(msgspec.Struct, frozen=True):
    """A row of the report."""

    name: str
    inject: Fault
    role: str
    hold_seconds: float = 0.0
    """Between the fault and its undoing, so much to twice as much."""
    takes_all: bool = False
    """Every worker of the role at once: nobody can serve."""
    breaks_connections: bool = False
    """Those of clients, which see it."""
