"""What is said of a room once it is over: one line of log, metrics, spans."""

from __future__ import annotations

import logging

from pdrt.observe.metrics import Metrics
from pdrt.observe.tracing import Attributes, Tracer
from pdrt.protocol.messages import Drained
from pdrt.scheduling.prefill_job import PrefillJob

log = logging.getLogger(__name__)

SPAN_BY_PHASE = {
    "queued": "prefill.queue",
    "compute": "prefill.compute",
    "drain": "prefill.transfer",
}


class RoomEnds:
    """Tells people; decides nothing."""

    def __init__(self, metrics: Metrics, tracer: Tracer) -> None:
        self._metrics = metrics
        self._tracer = tracer

    def ended(self, job: PrefillJob, drained: Drained, now: float) -> None:
        """`drained` is being sent, and the room's pages are about to be released."""
        phases = _phases(job, now)
        for phase, (start, end) in phases.items():
            self._metrics.observe_handover(phase, end - start)
        log.info(
            "room ended",
            extra={
                "room": drained.room,
                "request_id": job.grant.context.request_id or "-",
                "outcome": drained.outcome.value,
                "reason": drained.reason.value if drained.reason is not None else "-",
                "prompt_tokens": job.length,
                "computed_tokens": job.computed - job.found,
                "cached_tokens": job.found,
                "bytes": drained.bytes_written,
                "seconds": now - job.queued_at,
                **{f"{phase}_seconds": end - start for phase, (start, end) in phases.items()},
            },
        )
        if self._tracer.is_on:
            self._trace(job, drained, phases)

    def _trace(
        self, job: PrefillJob, drained: Drained, phases: dict[str, tuple[float, float]]
    ) -> None:
        attributes: Attributes = {
            "pdrt.request_id": job.grant.context.request_id,
            "pdrt.room": str(drained.room),
            "pdrt.prompt_tokens": job.length,
            "pdrt.cached_tokens": job.found,
            "pdrt.bytes": drained.bytes_written,
            "pdrt.engine": "local",
            "pdrt.outcome": drained.outcome.value,
        }
        for phase, (start, end) in phases.items():
            parent = job.grant.context.traceparent
            self._tracer.record(SPAN_BY_PHASE[phase], parent, start, end, attributes)


def _phases(job: PrefillJob, now: float) -> dict[str, tuple[float, float]]:
    """From when to when; a phase that it did not live to see takes no time."""
    started_at = job.started_at or now
    computed_at = job.computed_at or now
    return {
        "queued": (job.queued_at, started_at),
        "compute": (started_at, computed_at),
        "drain": (computed_at, now),
    }
