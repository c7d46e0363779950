"""Silence, judged fairly. Pure.

Whoever judges must first have read everything that has arrived (the adapter drains its sockets
before each tick), and whoever was itself asleep accuses nobody: a tick that comes late restarts
every clock. One that is late again and again is slow, not asleep, and may not put off its judgement
for ever: clocks are restarted once per period of silence, and the sleep of other late ticks is left
out of every age.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)

TICK_SECONDS = 0.1
"""The adapter calls `handle_timer` this often."""


class SilenceClock(Generic[Peer]):
    """When each watched peer was last heard."""

    def __init__(self, silence_seconds: float, tick_late_seconds: float, now: float) -> None:
        self._silence_seconds = silence_seconds
        self._tick_late_seconds = tick_late_seconds
        self._last_tick = now
        # Since clocks were restarted; at the beginning they may be.
        self._awake_seconds = math.inf
        self.slept_seconds = 0.0
        """How long we were asleep before the last tick. Deadlines that others must meet move by as
        much: their answers could not be read."""
        self._heard: dict[Peer, float] = {}

    def heard(self, peer: Peer, now: float) -> None:
        """Watch `peer`, or note a sign of life."""
        self._heard[peer] = now

    def forget(self, peer: Peer) -> None:
        """Stop watching `peer`. Idempotent."""
        self._heard.pop(peer, None)

    def watched(self) -> Iterable[Peer]:
        return self._heard.keys()

    def tick(self, now: float) -> list[Peer]:
        """The peers that were silent past the bound; they are no longer watched."""
        pause, self._last_tick = now - self._last_tick, now
        # Whoever has said nothing since the last restart has been found silent by then.
        may_restart = self._awake_seconds > self._silence_seconds
        if may_restart and pause > self._tick_late_seconds:
            self.slept_seconds, self._awake_seconds = pause, 0.0
            self._heard = dict.fromkeys(self._heard, now)
            return []
        self.slept_seconds = max(0.0, pause - self._tick_late_seconds)
        self._awake_seconds += pause - self.slept_seconds
        if self.slept_seconds:
            self._heard = {p: min(t + self.slept_seconds, now) for p, t in self._heard.items()}
        silent = [p for p, heard in self._heard.items() if now - heard > self._silence_seconds]
        for peer in silent:
            del self._heard[peer]
        return silent
