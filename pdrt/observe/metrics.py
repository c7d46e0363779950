"""Prometheus metrics of one process, the same names in every role.

Each process has one `Metrics` with a registry of its own. A worker renders it into its `Report`;
the gateway merges the reports with its own, so that one scrape shows the whole deployment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""Seconds between two tokens, and of one phase of a hand-over."""
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Seconds until a first token, and until a revoked room has drained."""


class _WithoutCreated(Collector):
    """A registry without its `_created` series: they double every family and nobody reads them.

    `prometheus_client.disable_created_metrics` would do it too, for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class Metrics:
    """What one process counts. All series carry `role` and `worker`; those whose value belongs to
    one device carry `rank` too."""

    def __init__(self, role: str, worker: str, rank: int = 0) -> None:
        """`role` is `prefill`, `decode` or `gateway`; `worker` an incarnation as `ids.short`."""
        self._base = (role, worker)
        self._ranked = (role, worker, str(rank))
        self.registry = CollectorRegistry()
        self._build_gauges()
        self._build_histograms()
        self._build_counters()

    def _build_gauges(self) -> None:
        self._pages = self._gauge("pdrt_pages", "KV pages by owner", "rank", "owner")
        self._leases = self._gauge("pdrt_leases", "Leases by state", "state")
        self._rooms = self._gauge("pdrt_rooms", "Rooms by state", "state")
        self._quarantined = self._gauge("pdrt_quarantined_pages", "Pages of quarantined leases")
        self._queue = self._gauge("pdrt_queue", "Requests waiting to be admitted")

    def _build_histograms(self) -> None:
        self._drain = self._histogram(
            "pdrt_drain_seconds", "From a lease's Revoke until its pages are free", _WAIT_BUCKETS
        )
        self._ttft = self._histogram("pdrt_ttft_seconds", "Time to first token", _WAIT_BUCKETS)
        self._itl = self._histogram("pdrt_itl_seconds", "Time between two tokens", _STEP_BUCKETS)
        self._handover = self._histogram(
            "pdrt_handover_seconds", "Phases of a hand-over", _STEP_BUCKETS, "phase"
        )

    def _build_counters(self) -> None:
        self._transferred = self._counter(
            "pdrt_transfer_bytes", "KV bytes written to a peer", "rank", "engine"
        )
        self._rejected = self._counter(
            "pdrt_rejected_frames", "Frames that were not a message", "reason"
        )
        self._stale = self._counter(
            "pdrt_stale_messages", "Messages that came too late to change anything", "reason"
        )
        self._recomputed = self._counter(
            "pdrt_recomputed_prompt_tokens",
            "Prompt tokens computed again for a request that moved",
        )
        self._requests = self._counter("pdrt_requests", "Requests by how they ended", "outcome")
        self._fences = self._counter("pdrt_fences", "Fences carried out", "engine")
        self._preemptions = self._counter("pdrt_preemptions", "Sequences preempted for pages")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, ("role", "worker", *labels), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("role", "worker", *labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            name, text, ("role", "worker", *labels), buckets=buckets, registry=self.registry
        )

    def set_pages(self, owners: Mapping[str, int]) -> None:
        """Pages by owner: `free`, `sequence`, `cache`, `lease`, `room`."""
        for owner, count in owners.items():
            self._pages.labels(*self._ranked, owner).set(count)

    def set_leases(self, states: Mapping[str, int]) -> None:
        """Leases by state; a state that is not named keeps its last value."""
        for state, count in states.items():
            self._leases.labels(*self._base, state).set(count)

    def set_rooms(self, states: Mapping[str, int]) -> None:
        """Rooms by state; a state that is not named keeps its last value."""
        for state, count in states.items():
            self._rooms.labels(*self._base, state).set(count)

    def set_quarantined_pages(self, count: int) -> None:
        self._quarantined.labels(*self._base).set(count)

    def set_queue(self, count: int) -> None:
        self._queue.labels(*self._base).set(count)

    def observe_drain(self, seconds: float) -> None:
        self._drain.labels(*self._base).observe(seconds)

    def observe_ttft(self, seconds: float) -> None:
        self._ttft.labels(*self._base).observe(seconds)

    def observe_itl(self, seconds: float) -> None:
        self._itl.labels(*self._base).observe(seconds)

    def observe_handover(self, phase: str, seconds: float) -> None:
        """`phase`: queued, prefill, transfer, decode; on prefill workers queued, compute, drain."""
        self._handover.labels(*self._base, phase).observe(seconds)

    def count_transfer(self, engine: str, byte_count: int) -> None:
        self._transferred.labels(*self._ranked, engine).inc(byte_count)

    def count_rejected_frame(self, reason: str, count: int = 1) -> None:
        self._rejected.labels(*self._base, reason).inc(count)

    def count_stale_message(self, reason: str, count: int = 1) -> None:
        self._stale.labels(*self._base, reason).inc(count)

    def count_recomputed_prompt_tokens(self, count: int) -> None:
        self._recomputed.labels(*self._base).inc(count)

    def count_request(self, outcome: str) -> None:
        self._requests.labels(*self._base, outcome).inc()

    def count_fence(self, engine: str, count: int = 1) -> None:
        self._fences.labels(*self._base, engine).inc(count)

    def count_preemption(self) -> None:
        self._preemptions.labels(*self._base).inc()

    def render(self) -> bytes:
        """Prometheus text, one HELP and TYPE per family."""
        return generate_latest(_WithoutCreated(self.registry))
