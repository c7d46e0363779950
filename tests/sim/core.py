"""Simulated time, one source of chance, and what a run may find."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from pdrt.ids import RoomId


class Kind(Enum):
    """What went wrong; a mutant must be caught for the right one."""

    DESTINATION = "destination"
    """A write landed on a page that its room does not lease (I2)."""
    SOURCE = "source"
    """A write read a source page that no longer belonged to its room (I3)."""
    CONTENT = "content"
    """A sequence decodes on pages that do not hold its prompt (I6)."""
    TOKEN = "token"
    """A client was sent a wrong, late or repeated token (I6)."""
    INVARIANT = "invariant"
    """An assertion of the product failed (I1, I4, I5)."""
    LIVENESS = "liveness"
    """Something never ended after faults had healed (I7)."""
    FENCES = "fences"
    """A fence without a cause, or more than one for one cause."""
    BOUNDS = "bounds"
    """A table outgrew its bound (I8)."""


BRIEF_FIELDS = frozenset(
    ("room", "seq", "generation", "floor", "writer", "pages", "first_page")
) | {"reason", "outcome", "rooms", "refusal", "retryable"}
"""What a trace shows of a message."""


def brief(value: object) -> object:
    """A message in few words."""
    if isinstance(value, RoomId):
        return f"{value.decode:x}/{value.serial}"
    if not isinstance(value, msgspec.Struct):
        return value
    shown = {f: getattr(value, f) for f in value.__struct_fields__ if f in BRIEF_FIELDS}
    words = (
        f"{field}={item:x}" if field == "writer" else f"{field}={brief(item)}"
        for field, item in shown.items()
        if item is not None
    )
    return f"{type(value).__name__}({', '.join(words)})"


class Violation(Exception):
    """A broken invariant: the run ends here."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(f"{kind.value}: {text}")
        self.kind = kind


class Simulator:
    """A heap of events. Equal times run in the order in which they were scheduled."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.events = 0
        self.trace = trace
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Run `call(*arguments)` once, `seconds` from now."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + seconds, self._order, call, arguments))

    def run_until(self, end: float) -> None:
        """Run every event up to `end`."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, call, arguments = heapq.heappop(heap)
            self.events += 1
            call(*arguments)
        self.now = end

    def run_events(self, count: int) -> None:
        """Run the next `count` events."""
        for _ in range(min(count, len(self._heap))):
            self.now, _, call, arguments = heapq.heappop(self._heap)
            self.events += 1
            call(*arguments)

    def say(self, who: str, text: str, *arguments: object) -> None:
        """One line of the trace. Formats nothing unless somebody reads it."""
        if self.trace is not None:
            line = text % tuple(map(brief, arguments)) if arguments else text
            self.trace(f"{self.now:9.3f} {who:<5} {line}")

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability
