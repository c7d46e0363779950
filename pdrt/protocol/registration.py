"""A worker's half of the gateway channel: who listens, who is gone. Pure; one per gateway."""

from __future__ import annotations

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.gateway_messages import Registered

REGISTER_SECONDS_MIN = 0.1
"""Pause before the second `Register` to a gateway that has not answered yet; doubles."""


class Registration:
    """One gateway endpoint, as a worker sees it."""

    def __init__(
        self, endpoint: str, worker: Incarnation, config: ProtocolConfig, now: float
    ) -> None:
        self.endpoint = endpoint
        self.gateway: Incarnation | None = None
        """Who answered last and is not lost."""
        self.prefill_endpoints: tuple[str, ...] = ()
        """As the newest answer lists them."""
        self.refusal: str | None = None
        self._worker = worker
        self._interval = config.hello_interval_seconds
        self._silence: SilenceClock[str] = SilenceClock(
            config.silence_seconds, config.tick_late_seconds, now
        )
        self._seq = 0
        self._last_answer = 0
        self._pause = 0.0
        self._due = now

    def next_seq(self, now: float) -> int:
        """For a `Register` that is sent in this same step."""
        self._seq += 1
        self._pause = min(max(2 * self._pause, REGISTER_SECONDS_MIN), self._interval)
        self._due = now + self._pause
        return self._seq

    def is_due(self, now: float) -> bool:
        """It is time for the next `Register`."""
        return now >= self._due

    def registered(self, message: Registered, now: float) -> Incarnation | None:
        """The gateway's answer; returns the incarnation that it makes a lost one, if any. The same
        gateway may answer again, with other endpoints. An answer to another worker or an old
        `Register` changes nothing."""
        is_first = self._last_answer < message.seq <= self._seq
        is_again = message.seq == self._last_answer and message.gateway == self.gateway
        if message.worker != self._worker or not (is_first or is_again):
            return None
        self._last_answer = message.seq
        self._pause = self._interval
        self._silence.heard(self.endpoint, now)
        lost = self.gateway if self.gateway != message.gateway else None
        self.gateway = message.gateway
        self.prefill_endpoints = message.prefill_endpoints
        self.refusal = message.refusal
        return lost

    def handle_timer(self, now: float) -> Incarnation | None:
        """The gateway incarnation lost to silence, if it is now; everything inbound has been
        read."""
        if not self._silence.tick(now):
            return None
        lost, self.gateway = self.gateway, None
        self._pause, self._due = 0.0, now
        return lost
