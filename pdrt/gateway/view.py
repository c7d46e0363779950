"""What the gateway's metrics say of now. Reads only."""

from __future__ import annotations

from collections import Counter

from pdrt.gateway.readiness import readiness
from pdrt.gateway.registry import Registry, WorkerState
from pdrt.gateway.requests import Requests
from pdrt.observe.metrics import Metrics
from pdrt.protocol.gateway_messages import Role


def set_gauges(metrics: Metrics, registry: Registry, requests: Requests, streams: int) -> None:
    """Just before they are rendered. `streams`: answers that are not over."""
    workers = registry.workers.values()
    metrics.set_workers(
        Counter((worker.register.role.value, worker.state.value) for worker in workers)
    )
    prefills = {w.register.endpoint for w in workers if w.state is WorkerState.LIVE}
    metrics.set_pairs(
        sum(
            len(prefills.intersection(worker.register.paired))
            for worker in workers
            if worker.register.role is Role.DECODE and worker.state is WorkerState.LIVE
        )
    )
    waiting = requests.waiting
    metrics.set_in_flight({"open": streams - waiting, "waiting": waiting})
    can_serve, reasons = readiness(registry)
    metrics.set_ready(can_serve and not reasons)
    metrics.set_attempts(requests.attempts)
