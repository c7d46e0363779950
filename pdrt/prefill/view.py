"""What others see of a prefill worker: registration, readiness, metrics, status. Reads only."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Protocol

import msgspec

from pdrt import __version__
from pdrt.config import WorkerConfig
from pdrt.ids import Incarnation, short
from pdrt.kv.pages import PageTable
from pdrt.model.executor import Executor
from pdrt.observe.counters import CounterBridge
from pdrt.observe.metrics import Metrics
from pdrt.observe.steps import step_complaints
from pdrt.observe.worker_http import WorkerHttp
from pdrt.prefill.handover import Handover
from pdrt.protocol.gateway_messages import Register, Role
from pdrt.protocol.messages import Fingerprint, Load
from pdrt.protocol.rooms import RoomState, RoomTable
from pdrt.scheduling.prefill import PrefillScheduler
from pdrt.transfer.gateway_link import GatewayLinks

ROWS_MAX = 1000
"""Rooms listed in a status; the rest is counted."""


class Seen(Protocol):
    """The parts of a prefill worker that are shown."""

    config: WorkerConfig
    incarnation: Incarnation
    executor: Executor
    fingerprint: Fingerprint
    pages: PageTable
    metrics: Metrics
    scheduler: PrefillScheduler
    table: RoomTable
    handover: Handover
    links: GatewayLinks
    http: WorkerHttp

    @property
    def is_leaving(self) -> bool: ...


class PrefillView:
    """Everything that a prefill worker says about itself."""

    def __init__(self, worker: Seen) -> None:
        self._worker = worker
        self._bridge = CounterBridge()

    def load(self) -> Load:
        """How busy it is."""
        worker = self._worker
        return Load(
            running=worker.scheduler.running,
            queued=worker.scheduler.queued,
            pages_free=worker.pages.free_count,
            pages_total=worker.pages.total,
        )

    def reasons(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        return self.complaints() + (["leaving"] if self._worker.is_leaving else [])

    def complaints(self) -> list[str]:
        """Why it is not healthy; empty when it is."""
        complaints: list[str] = []
        if self._worker.table.peers.is_full:
            complaints.append("decode_incarnations_max is reached: it drains and exits")
        return complaints + step_complaints(self._worker.executor.step_age(time.monotonic()))

    def register(self, seq: int) -> Register:
        """What it tells its gateways."""
        worker = self._worker
        complaints = tuple(self.complaints())
        return Register(
            role=Role.PREFILL,
            worker=worker.incarnation,
            seq=seq,
            endpoint=worker.handover.endpoint,
            fingerprint=worker.fingerprint,
            max_model_len=worker.executor.identity.max_model_len,
            requests_max=worker.config.protocol.rooms_max,
            version=__version__,
            metrics=worker.http.url + "/metrics",
            healthy=not complaints,
            reasons=complaints,
            draining=worker.is_leaving,
            load=self.load(),
        )

    def render(self) -> bytes:
        """Prometheus text."""
        worker, metrics = self._worker, self._worker.metrics
        metrics.set_pages({kind.value: n for kind, n in worker.pages.counts().items()})
        states = Counter(room.state for room in worker.table.rooms.values())
        shown = (RoomState.OPEN, RoomState.CLOSING)
        metrics.set_rooms({state.value: states[state] for state in shown})
        metrics.set_queue(worker.scheduler.queued)
        rejected = worker.handover.rejected + worker.links.rejected
        stale = worker.table.stale + worker.links.stale
        self._bridge.pass_on("rejected", rejected, metrics.count_rejected_frame)
        self._bridge.pass_on("stale", stale, metrics.count_stale_message)
        return metrics.render()

    def status(self) -> bytes:
        """A JSON object for `/status`."""
        worker = self._worker
        now = time.monotonic()
        rooms = list(worker.table.rooms.values())[:ROWS_MAX]
        status: dict[str, Any] = {
            "pages": {kind.value: n for kind, n in worker.pages.counts().items()},
            "pages_total": worker.pages.total,
            "rooms": [
                {
                    "room": str(room.room),
                    "state": room.state.value,
                    "age_seconds": round(now - room.opened_at, 3),
                    "pages": len(worker.scheduler.jobs[room.room].pages),
                    "computed": worker.scheduler.jobs[room.room].computed,
                    "reason": room.reason.value if room.reason is not None else None,
                }
                for room in rooms
            ],
            "rooms_total": len(worker.table.rooms),
            "decode_peers": [
                {
                    "worker": short(peer.incarnation),
                    "generations": sorted(peer.engines),
                    "floor": peer.floor,
                    "unsettled_generation": peer.unsettled_generation,
                    "state": "lost" if peer.is_lost else "live",
                    "rooms": len(peer.rooms),
                }
                for peer in worker.table.peers.known.values()
                if not peer.is_lost or peer.engines
            ],
            "gateways": worker.links.gateways(),
            "queued": worker.scheduler.queued,
            "running": worker.scheduler.running,
            "stale_messages": dict(worker.table.stale + worker.links.stale),
        }
        return msgspec.json.encode(status)
