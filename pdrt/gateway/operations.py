"""Endpoints for those who run the gateway: models, probes, metrics, status, checks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pdrt import __version__
from pdrt.gateway.errors import ApiError
from pdrt.gateway.exposition import merge
from pdrt.gateway.http import JsonResponse
from pdrt.gateway.hub import Hub
from pdrt.gateway.registry import Worker, WorkerState
from pdrt.gateway.schema.answers import VersionAnswer
from pdrt.gateway.served_model import ServedModel
from pdrt.ids import short
from pdrt.protocol.gateway_messages import Report
from pdrt.protocol.messages import Fingerprint

REPORT_SECONDS_MAX = 1.0
"""A scrape shows the workers that answer in time."""
NAMES_MAX = 8
"""Workers that an answer names."""
CHECK_SECONDS_MAX = 5.0
"""A check walks all tables of a worker."""


class Operations:
    """Everything but completions."""

    def __init__(self, hub: Hub, model: ServedModel, openapi: bytes) -> None:
        self._openapi = openapi
        self._hub = hub
        self._model = model
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._model.name:
            message = f"The model '{name[:200]}' does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JsonResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        limit = self._hub.registry.max_model_len()
        own = self._model.identity.max_model_len
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdrt",
            "max_model_len": own if limit is None else min(own, limit),
        }

    async def version(self, request: Request) -> Response:
        return JsonResponse(VersionAnswer(__version__))

    async def openapi(self, request: Request) -> Response:
        """What this API takes and gives."""
        return JsonResponse(self._openapi)

    async def health(self, request: Request) -> Response:
        """This process is alive."""
        return JsonResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Workers can serve. With reasons, not as a full pair."""
        ready, reasons = self._hub.readiness()
        body = {"ready": ready, "reasons": reasons}
        return JsonResponse(body, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Of this gateway and of every worker that answers."""
        reports = await self._hub.inspect(check=False, seconds_max=REPORT_SECONDS_MAX)
        texts = [self._hub.render_metrics(), *(report.metrics for report in reports.values())]
        # Beside the loop: some tenths of a second for hundreds of workers.
        text = await asyncio.to_thread(merge, texts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        """All there is to know about the deployment."""
        reports = await self._hub.inspect(check=False, seconds_max=REPORT_SECONDS_MAX)
        ready, reasons = self._hub.readiness()
        gateway = {
            "incarnation": short(self._hub.incarnation),
            "version": __version__,
            "model": self._model.name,
            "digest": self._model.identity.digest,
            "requests": len(self._hub.requests),
            "attempts": self._hub.requests.attempts,
            "draining": self._hub.is_draining,
            "totals": self._hub.metrics.totals(),
        }
        workers = [
            _worker_status(worker, reports.get(incarnation), self._hub.clock())
            for incarnation, worker in self._hub.registry.workers.items()
        ]
        body = {"ready": ready, "reasons": reasons, "gateway": gateway, "workers": workers}
        return JsonResponse(body)

    async def drain(self, request: Request) -> Response:
        """Asks a worker to finish what it has and leave. Idempotent."""
        worker = self._named(request)
        self._hub.drain(worker.incarnation)
        return JsonResponse(_who(worker))

    async def gone(self, request: Request) -> Response:
        """Whoever started it saw it die: nobody needs to wait for its silence. Nothing happens to
        one that lives after all."""
        worker = self._named(request)
        self._hub.doubt(worker.incarnation)
        return JsonResponse(_who(worker))

    def _named(self, request: Request) -> Worker:
        """The worker, not lost, whose name begins as the path says. Raises ApiError."""
        prefix = request.path_params["worker"].lower()
        found = self._hub.registry.find(prefix)
        if not found:
            raise ApiError(404, f"No worker's name begins with '{prefix[:40]}'", param="worker")
        living = [worker for worker in found if worker.state is not WorkerState.LOST]
        if len(living) > 1:
            names = ", ".join(worker.name for worker in living[:NAMES_MAX])
            raise ApiError(409, f"'{prefix[:40]}' may be any of: {names}", param="worker")
        if not living:
            raise ApiError(409, f"{found[0].name} is lost already", param="worker")
        return living[0]

    async def check(self, request: Request) -> Response:
        """Checks every invariant everywhere; 500 when one is broken, or a worker is silent."""
        workers = list(self._hub.registry.live())
        reports = await self._hub.inspect(check=True, seconds_max=CHECK_SECONDS_MAX)
        results = []
        for worker in workers:
            report = reports.get(worker.incarnation)
            results.append(
                {
                    "role": worker.register.role.value,
                    "worker": short(worker.incarnation),
                    "answered": report is not None,
                    "broken": [] if report is None else list(report.broken),
                }
            )
        broken = self._hub.broken_invariants()
        ok = not broken and all(r["answered"] and not r["broken"] for r in results)
        body = {"ok": ok, "gateway": {"broken": broken}, "workers": results}
        return JsonResponse(body, 200 if ok else 500)


def _who(worker: Worker) -> dict[str, str]:
    role, name = worker.register.role.value, short(worker.incarnation)
    return {"role": role, "worker": name, "state": worker.state.value}


def _worker_status(worker: Worker, report: Report | None, now: float) -> dict[str, Any]:
    register = worker.register
    lost_seconds = None if worker.lost_at is None else round(now - worker.lost_at, 1)
    return {
        "role": register.role.value,
        "worker": short(worker.incarnation),
        "endpoint": register.endpoint,
        "state": worker.state.value,
        "lost_seconds": lost_seconds,
        "fingerprint": _fingerprint_status(register.fingerprint),
        "load": msgspec.to_builtins(register.load),
        "healthy": register.healthy,
        "reasons": register.reasons,
        "paired": register.paired,
        "refused": register.refused,
        "local_prefill": register.local_prefill,
        "version": register.version,
        "metrics": register.metrics,
        "status": None if report is None else _json_or_none(report.status),
    }


def _fingerprint_status(fingerprint: Fingerprint) -> dict[str, Any]:
    """With names for the layout's fields, which travel as an array."""
    layout = fingerprint.layout
    return {
        **msgspec.to_builtins(fingerprint),
        "layout": {name: getattr(layout, name) for name in layout.__struct_fields__},
    }


def _json_or_none(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
