"""What others see of a decode worker: registration, readiness, metrics, status. Reads only."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from pdrt import __version__
from pdrt.config import WorkerConfig
from pdrt.decode.handover import DecodeRanks, Handover
from pdrt.decode.pages import DecodePages
from pdrt.decode.rank import DecodeRank
from pdrt.ids import Incarnation, short
from pdrt.kv.pages import PageTable
from pdrt.model.executor import Executor
from pdrt.observe.counters import CounterBridge
from pdrt.observe.metrics import Metrics
from pdrt.observe.worker_http import WorkerHttp
from pdrt.protocol.gateway_messages import Register, Role
from pdrt.protocol.leases import Lease, LeaseState, LeaseTable
from pdrt.protocol.messages import Fingerprint, Load
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, RequestState
from pdrt.scheduling.local_prefill import LocalPrefill
from pdrt.transfer.gateway_link import GatewayLinks
from pdrt.transfer.liveness import Ailment, Complaint, Liveness, hangs
from pdrt.transfer.rank_group import RankState

ROWS_MAX = 64
"""Leases and requests listed in a status, the newest; the rest is counted. A gateway asks every
worker for its status each second while somebody watches."""

_SHOWN = (LeaseState.GRANTED, LeaseState.REVOKING)
Row = TypeVar("Row")


class Seen(Protocol):
    """The parts of a decode worker that are shown."""

    config: WorkerConfig
    incarnation: Incarnation
    executor: Executor
    fingerprint: Fingerprint
    pages: PageTable
    metrics: Metrics
    scheduler: DecodeScheduler
    kv: DecodePages
    table: LeaseTable
    handover: Handover
    rank: DecodeRank
    ranks: DecodeRanks
    local: LocalPrefill
    links: GatewayLinks
    http: WorkerHttp
    liveness: Liveness

    @property
    def is_leaving(self) -> bool: ...


class DecodeView:
    """Everything that a decode worker says about itself."""

    def __init__(self, worker: Seen) -> None:
        self._worker = worker
        self._bridge = CounterBridge()

    def load(self) -> Load:
        """How busy it is."""
        worker = self._worker
        return Load(
            running=worker.scheduler.running,
            queued=worker.scheduler.queued,
            # Cached pages that nobody reads are as good as free.
            pages_free=worker.kv.available,
            pages_total=worker.pages.total,
        )

    def reasons(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        reasons = [complaint.text for complaint in self.complaints()]
        if not self._worker.local.is_on and not self._worker.table.usable_endpoints():
            reasons.append("no prefill worker is paired")
        reasons += self._worker.links.complaints()
        return reasons + (["leaving"] if self._worker.is_leaving else [])

    def complaints(self) -> list[Complaint]:
        """Why it is not healthy, whoever it is paired with; empty when it is."""
        now = time.monotonic()
        complaints = self._worker.liveness.complaints(now)
        refusal = self._worker.table.refuses(now)
        if refusal is not None:
            complaints.append(Complaint(Ailment.ADMISSION_STOPPED, refusal))
        return complaints

    def refused_pairs(self) -> tuple[str, ...]:
        """Prefill workers that it cannot be paired with, and why."""
        unreached = self._worker.handover.refusals()
        peers = [p for p in self._worker.table.pairing.peers.values() if p.is_wanted]
        why = {p.endpoint: p.refusal or unreached.get(p.endpoint) for p in peers}
        return tuple(f"{endpoint}: {text}" for endpoint, text in why.items() if text)

    def register(self, seq: int) -> Register:
        """What it tells its gateways."""
        worker = self._worker
        complaints = self.complaints()
        limits = worker.config.scheduler
        return Register(
            role=Role.DECODE,
            worker=worker.incarnation,
            seq=seq,
            endpoint=None,
            fingerprint=worker.fingerprint,
            max_model_len=worker.executor.identity.max_model_len,
            requests_max=limits.queue_max + limits.max_num_seqs,
            version=__version__,
            metrics=worker.http.url + "/metrics",
            healthy=not complaints,
            reasons=tuple(complaint.text for complaint in complaints),
            hangs=hangs(complaints),
            draining=worker.is_leaving,
            paired=tuple(worker.table.usable_endpoints()),
            refused=self.refused_pairs(),
            load=self.load(),
            local_prefill=worker.local.is_on,
        )

    def render(self) -> bytes:
        """Prometheus text."""
        worker, metrics = self._worker, self._worker.metrics
        metrics.set_pages({kind.value: n for kind, n in worker.pages.counts().items()})
        states = Counter(lease.state for lease in worker.table.leases.values())
        metrics.set_leases({state.value: states[state] for state in _SHOWN})
        now = time.monotonic()
        held = Counter(_reason(lease) for lease in self._quarantined(now))
        metrics.set_quarantine(worker.table.quarantined_pages(now), held)
        metrics.set_in_flight(self._in_flight())
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
        self._render_engines()
        cache = worker.kv.cache
        self._bridge.pass_on("prefix_pages", cache.counts, metrics.count_prefix_cache_pages)
        self._bridge.pass_on("prefix_tokens", cache.tokens, metrics.count_prefix_cache_tokens)
        self._bridge.pass_on("fences", worker.table.fences_by_engine, metrics.count_fence)
        return metrics.render()

    def _render_engines(self) -> None:
        worker, metrics = self._worker, self._worker.metrics
        for rank, report in worker.ranks.reports().items():
            peers, writes = report.refused_peers, report.refused_writes
            count_write = partial(metrics.count_refused_write, rank)
            self._bridge.pass_on(f"refused_tcp {rank}", peers, metrics.count_refused_peer)
            self._bridge.pass_on(f"refused_writes {rank}", writes, count_write)
        usable = [p for p in worker.table.pairing.peers.values() if p.is_usable()]
        writers = Counter(peer.engine for peer in usable)
        metrics.set_writers({name: writers[name] for name in worker.table.pairing.engines})

    def _quarantined(self, now: float) -> list[Lease]:
        """Leases that have been revoked for longer than the bound, oldest first."""
        oldest = now - self._worker.config.protocol.quarantine_after_seconds
        leases = self._worker.table.leases.values()
        held = [x for x in leases if x.state is LeaseState.REVOKING and x.revoking_at < oldest]
        return sorted(held, key=lambda lease: lease.revoking_at)

    def _in_flight(self) -> dict[str, int]:
        """Requests by state; those that hold a lease are `prefilling`."""
        states = Counter(r.state for r in self._worker.scheduler.requests.values())
        return {state.value: states[state] for state in RequestState}

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
        quarantined = self._quarantined(now)
        states = Counter(lease.state for lease in worker.table.leases.values())
        status: dict[str, Any] = {
            "pages": {kind.value: n for kind, n in worker.pages.counts().items()},
            "pages_total": worker.pages.total,
            "leases": [
                _lease(lease, now) | {"quarantined": lease in quarantined}
                for lease in _newest(worker.table.leases)
            ],
            "leases_total": len(worker.table.leases),
            "leases_by_state": {state.value: states[state] for state in _SHOWN},
            "quarantined_pages": worker.table.quarantined_pages(now),
            "quarantine": [_lease(lease, now) for lease in quarantined[:ROWS_MAX]],
            "requests": [_request(r, now) for r in _newest(worker.scheduler.requests)],
            "requests_by_state": self._in_flight(),
            "prefix_cache": {
                "pages": len(worker.kv.cache),
                "events": dict(worker.kv.cache.counts),
                "tokens": dict(worker.kv.cache.tokens),
            },
            "data_endpoint": worker.rank.data_endpoint,
            "writers": self._writers(),
            "ranks": worker.ranks.seen(now, self._heartbeat, worker.metrics.transferred()),
            "gateways": worker.links.gateways(),
            "queued": worker.scheduler.queued,
            "running": worker.scheduler.running,
            "fences": worker.table.fences,
            "stale_messages": dict(worker.table.stale + worker.links.stale),
            "totals": worker.metrics.totals(),
        }
        return msgspec.json.encode(status)

    def _writers(self) -> list[dict[str, Any]]:
        """The prefill workers that it is connected to."""
        unreached = self._worker.handover.refusals()
        return [
            {
                "endpoint": peer.endpoint,
                "worker": peer.writer and short(peer.writer),
                "generation": peer.newest_generation,
                "floor": peer.floor,
                "state": peer.state.value,
                "engine": peer.engine,
                "passed_over": list(peer.passed_over),
                "refusal": peer.refusal or unreached.get(peer.endpoint),
            }
            for peer in self._worker.table.pairing.peers.values()
            if peer.is_connected
        ]


def _newest(table: dict[Any, Row]) -> list[Row]:
    """Of a table in the order of insertion, the newest first."""
    return [table[key] for key in itertools.islice(reversed(table), ROWS_MAX)]


def _reason(lease: Lease) -> str:
    return "none" if lease.reason is None else lease.reason.value


def _lease(lease: Lease, now: float) -> dict[str, Any]:
    is_revoking = lease.state is LeaseState.REVOKING
    return {
        "room": str(lease.room),
        "state": lease.state.value,
        "age_seconds": round(now - (lease.revoking_at if is_revoking else lease.granted_at), 3),
        "pages": len(lease.pages),
        "reason": lease.reason.value if lease.reason is not None else None,
        "writer": short(lease.writer),
        "endpoint": lease.endpoint,
        "generation": lease.generation,
        "engine": lease.engine,
    }


def _request(request: DecodeRequest, now: float) -> dict[str, Any]:
    return {
        "request": str(request.request),
        "state": request.state.value,
        "room": None if request.room is None else str(request.room),
        "local_prefill": None if request.here is None else request.here.value,
        "age_seconds": round(now - request.arrived_at, 3),
        "pages": len(request.pages),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "tokens_taken": request.tokens_taken,
    }
