"""What others see of a prefill worker: registration, readiness, metrics, status. Reads only."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from enum import Enum
from typing import Any, Protocol

import msgspec

from pdrt import __version__
from pdrt.config import WorkerConfig
from pdrt.ids import Incarnation, short
from pdrt.kv.pages import PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.model.executor import Executor
from pdrt.observe.counters import CounterBridge
from pdrt.observe.metrics import Metrics
from pdrt.observe.worker_http import WorkerHttp
from pdrt.prefill.handover import Handover, PrefillRanks
from pdrt.protocol.gateway_messages import Register, Role
from pdrt.protocol.messages import Fingerprint, Load
from pdrt.protocol.rooms import Room, RoomState, RoomTable
from pdrt.scheduling.prefill import PrefillScheduler
from pdrt.scheduling.prefill_job import PrefillJob
from pdrt.transfer.gateway_link import GatewayLinks
from pdrt.transfer.liveness import Ailment, Complaint, Liveness, hangs
from pdrt.transfer.rank_group import RankState

ROWS_MAX = 64
"""Rooms listed in a status, the newest; the rest is counted. A gateway asks every worker for its
status each second while somebody watches."""
_SHOWN = (RoomState.OPEN, RoomState.CLOSING)


class Seen(Protocol):
    """The parts of a prefill worker that are shown."""

    config: WorkerConfig
    incarnation: Incarnation
    executor: Executor
    fingerprint: Fingerprint
    pages: PageTable
    cache: PrefixCache
    metrics: Metrics
    scheduler: PrefillScheduler
    table: RoomTable
    handover: Handover
    ranks: PrefillRanks
    links: GatewayLinks
    http: WorkerHttp
    liveness: Liveness

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
            pages_free=worker.cache.available,
            pages_total=worker.pages.total,
        )

    def reasons(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        reasons = [complaint.text for complaint in self.complaints()]
        reasons += self._worker.links.complaints()
        return reasons + (["leaving"] if self._worker.is_leaving else [])

    def complaints(self) -> list[Complaint]:
        """Why it is not healthy; empty when it is."""
        complaints = self._worker.liveness.complaints(time.monotonic())
        if self._worker.table.peers.is_full:
            why = "decode_incarnations_max is reached: it drains and exits"
            complaints.append(Complaint(Ailment.PEERS_FULL, why))
        return complaints

    def register(self, seq: int) -> Register:
        """What it tells its gateways."""
        worker = self._worker
        complaints = self.complaints()
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
            reasons=tuple(complaint.text for complaint in complaints),
            hangs=hangs(complaints),
            draining=worker.is_leaving,
            load=self.load(),
        )

    def render(self) -> bytes:
        """Prometheus text."""
        worker, metrics = self._worker, self._worker.metrics
        metrics.set_pages({kind.value: n for kind, n in worker.pages.counts().items()})
        metrics.set_rooms(self._rooms_by_state())
        metrics.set_in_flight(self._rooms_by_phase())
        metrics.set_queue(worker.scheduler.queued)
        metrics.set_ranks(self._ranks_by_state())
        ailing = {complaint.ailment for complaint in self.complaints()}
        metrics.set_unhealthy({each.value: int(each in ailing) for each in Ailment})
        rejected = worker.handover.rejected + worker.links.rejected
        stale = worker.table.stale + worker.links.stale
        self._bridge.pass_on("rejected", rejected, metrics.count_rejected_frame)
        refused = worker.handover.refused + worker.links.refused
        self._bridge.pass_on("refused", refused, metrics.count_refused_peer)
        self._bridge.pass_on("stale", stale, metrics.count_stale_message)
        cache = worker.cache
        self._bridge.pass_on("prefix_pages", cache.counts, metrics.count_prefix_cache_pages)
        self._bridge.pass_on("prefix_tokens", cache.tokens, metrics.count_prefix_cache_tokens)
        return metrics.render()

    def _rooms_by_state(self) -> dict[str, int]:
        states = Counter(room.state for room in self._worker.table.rooms.values())
        return {state.value: states[state] for state in _SHOWN}

    def _rooms_by_phase(self) -> dict[str, int]:
        jobs = self._worker.scheduler.jobs
        phases = Counter(_phase(r, jobs[r.room]) for r in self._worker.table.rooms.values())
        return {phase.value: phases[phase] for phase in Phase}

    @property
    def _heartbeat(self) -> float:
        return self._worker.config.protocol.hello_interval_seconds

    def _ranks_by_state(self) -> dict[str, int]:
        states = self._worker.ranks.states(time.monotonic(), self._heartbeat)
        counts = Counter(states.values())
        return {state.value: counts[state] for state in RankState}

    def status(self) -> bytes:
        """A JSON object for `/status`; docs/status.md says what is in it."""
        worker = self._worker
        now = time.monotonic()
        newest = itertools.islice(reversed(worker.table.rooms.values()), ROWS_MAX)
        jobs = worker.scheduler.jobs
        status: dict[str, Any] = {
            "pages": {kind.value: n for kind, n in worker.pages.counts().items()},
            "pages_total": worker.pages.total,
            "rooms": [_room(room, jobs[room.room], now) for room in newest],
            "rooms_total": len(worker.table.rooms),
            "rooms_by_state": self._rooms_by_state(),
            "rooms_by_phase": self._rooms_by_phase(),
            "prefix_cache": {
                "pages": len(worker.cache),
                "events": dict(worker.cache.counts),
                "tokens": dict(worker.cache.tokens),
            },
            "decode_peers": self._peers(),
            "ranks": worker.ranks.seen(now, self._heartbeat, worker.metrics.transferred()),
            "gateways": worker.links.gateways(),
            "queued": worker.scheduler.queued,
            "running": worker.scheduler.running,
            "stale_messages": dict(worker.table.stale + worker.links.stale),
            "totals": worker.metrics.totals(),
        }
        return msgspec.json.encode(status)

    def _peers(self) -> list[dict[str, Any]]:
        """Decode workers that are here, or whose memory could still be written."""
        return [
            {
                "worker": short(peer.incarnation),
                "generations": sorted(peer.engines),
                "engine": None if peer.newest is None else peer.newest.name,
                "passed_over": [] if peer.newest is None else list(peer.newest.passed_over),
                "floor": peer.floor,
                "unsettled_generation": peer.unsettled_generation,
                "state": "lost" if peer.is_lost else "live",
                "rooms": len(peer.rooms),
            }
            for peer in self._worker.table.peers.known.values()
            if not peer.is_lost or peer.engines
        ]


class Phase(Enum):
    """What is being done for a room."""

    QUEUED = "queued"
    COMPUTING = "computing"
    TRANSFERRING = "transferring"
    CLOSING = "closing"


def _phase(room: Room, job: PrefillJob) -> Phase:
    if room.state is not RoomState.OPEN:
        return Phase.CLOSING
    if job.computed_at is not None:
        return Phase.TRANSFERRING
    return Phase.QUEUED if job.started_at is None else Phase.COMPUTING


def _room(room: Room, job: PrefillJob, now: float) -> dict[str, Any]:
    return {
        "room": str(room.room),
        "state": room.state.value,
        "phase": _phase(room, job).value,
        "age_seconds": round(now - room.opened_at, 3),
        "peer": short(room.room.decode),
        "pages": len(job.pages),
        "tokens": len(job.grant.token_ids),
        "computed": job.computed,
        "cached": job.found,
        "reason": room.reason.value if room.reason is not None else None,
    }
