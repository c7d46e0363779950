"""Workers that somebody says have died, until their sockets show it. Pure.

A client's word alone costs a living worker nothing: its requests would move, three times at most,
and then fail. A process that ends closes its socket, which a gateway sees as soon as it sends.
"""

from __future__ import annotations

from pdrt.gateway.registry import Registry, WorkerState
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Inspect

DOUBT_SECONDS = 2.0
"""A socket of this host is closed before its process is reaped, and the end travels within
milliseconds. A worker that has not closed by then is left to its silence."""
PROBE_SERIAL = 0
"""Of the `Inspect` that is sent; nobody waits for its answer."""


class Doubts:
    """Whom to send something, to see whether it can be sent."""

    def __init__(self, gateway: Incarnation, registry: Registry) -> None:
        self._gateway = gateway
        self._registry = registry
        self._until: dict[Incarnation, float] = {}
        """Workers that were not lost, so no more than the registry knows."""

    def ask(self, worker: Incarnation, now: float) -> list[Inspect]:
        """What to send now; a worker that it cannot be sent to is lost. Idempotent."""
        if not self._is_alive(worker):
            return []
        self._until.setdefault(worker, now + DOUBT_SECONDS)
        return [self._probe(worker)]

    def on_tick(self, now: float) -> list[Inspect]:
        """What to send again."""
        for worker, until in list(self._until.items()):
            if now >= until or not self._is_alive(worker):
                del self._until[worker]
        return [self._probe(worker) for worker in self._until]

    def _probe(self, worker: Incarnation) -> Inspect:
        return Inspect(worker, PROBE_SERIAL, self._gateway)

    def _is_alive(self, worker: Incarnation) -> bool:
        known = self._registry.workers.get(worker)
        return known is not None and known.state is not WorkerState.LOST
