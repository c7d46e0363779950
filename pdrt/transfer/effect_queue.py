"""Effects in the order in which they were decided, also when applying one raises the next event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class EffectQueue(Generic[Effect]):
    """One FIFO per worker: messages leave in the order of their `seq`."""

    def __init__(self, apply_one: Callable[[Effect], None]) -> None:
        self._apply_one = apply_one
        self._queue: deque[Effect] = deque()
        self._is_applying = False

    def apply(self, effects: Sequence[Effect]) -> None:
        """Apply the effects of one event, after those already waiting."""
        self._queue.extend(effects)
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._queue:
                self._apply_one(self._queue.popleft())
        finally:
            self._is_applying = False
