"""Workers that somebody asked to leave, until they say that they do. Pure."""

from __future__ import annotations

import msgspec

from pdrt.gateway.registry import Registry, WorkerState
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Drain

RESEND_SECONDS = 1.0
"""A worker that got it registers as draining at once: one that has not said so by then did not."""
ASK_SECONDS_MAX = 60.0
"""A worker that is alive and has not obeyed for so long will not; whoever asked may ask again."""


class _Asked(msgspec.Struct):
    until: float
    resend_at: float


class Drains:
    """`Drain` is resent until its worker registers as draining; one that is lost may come back."""

    def __init__(self, gateway: Incarnation, registry: Registry) -> None:
        self._gateway = gateway
        self._registry = registry
        self._asked: dict[Incarnation, _Asked] = {}
        """LIVE and LOST workers, so no more than the registry knows."""

    def ask(self, worker: Incarnation, now: float) -> list[Drain]:
        """What to send now. Idempotent: nothing for a worker that is leaving or lost already."""
        if self._state(worker) is not WorkerState.LIVE:
            return []
        self._asked[worker] = _Asked(now + ASK_SECONDS_MAX, now + RESEND_SECONDS)
        return [Drain(worker, self._gateway)]

    def on_tick(self, now: float) -> list[Drain]:
        """What to send again."""
        sends: list[Drain] = []
        for worker, asked in list(self._asked.items()):
            state = self._state(worker)
            if state in (None, WorkerState.DRAINING) or now >= asked.until:
                del self._asked[worker]
            elif state is WorkerState.LIVE and now >= asked.resend_at:
                asked.resend_at = now + RESEND_SECONDS
                sends.append(Drain(worker, self._gateway))
        return sends

    def _state(self, worker: Incarnation) -> WorkerState | None:
        known = self._registry.workers.get(worker)
        return None if known is None else known.state
