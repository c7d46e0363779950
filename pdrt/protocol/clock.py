"""Silence, judged fairly. Pure.

Whoever judges must first have read everything that has arrived (the adapter drains its sockets
before each tick), and whoever was itself asleep accuses nobody: a tick that comes late restarts
every clock.
"""

from __future__ import annotations

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
        was_asleep = now - self._last_tick > self._tick_late_seconds
        self._last_tick = now
        if was_asleep:
            self._heard = dict.fromkeys(self._heard, now)
            return []
        silent = [p for p, heard in self._heard.items() if now - heard > self._silence_seconds]
        for peer in silent:
            del self._heard[peer]
        return silent
