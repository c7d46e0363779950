"""A worker lives and dies as one: a leader whose rank is silent past the bound ends it. Pure."""

from __future__ import annotations

from pdrt.config import ProtocolConfig
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.effects import EndWorker


class RankWatch:
    """Signs of life of the ranks other than the leader."""

    def __init__(self, ranks: int, config: ProtocolConfig, now: float) -> None:
        self._seconds = config.silence_seconds
        self._clock: SilenceClock[int] = SilenceClock(
            config.silence_seconds, config.tick_late_seconds, now
        )
        for rank in range(1, ranks):
            self._clock.heard(rank, now)

    def heard(self, rank: int, now: float) -> None:
        """Any message of `rank`."""
        self._clock.heard(rank, now)

    def handle_timer(self, now: float) -> list[EndWorker]:
        """`EndWorker` when a rank hangs."""
        silence = f"has been silent for {self._seconds:g} s (--silence-seconds)"
        return [EndWorker(f"rank {rank} {silence}") for rank in self._clock.tick(now)]
