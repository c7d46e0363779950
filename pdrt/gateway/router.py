"""Which workers a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from pdrt.gateway.registry import Registry, Worker
from pdrt.ids import Incarnation

ENDPOINTS_MAX = 16
"""Prefill endpoints that a `Submit` names: more would only make every frame longer."""


class Route(msgspec.Struct, frozen=True):
    """A decode worker, and prefill endpoints in order of preference, at least one."""

    decode: Incarnation
    prefill_endpoints: tuple[str, ...]


class Demand(msgspec.Struct, frozen=True):
    """What this gateway has itself given to workers and not had back: fresher than any load that
    a worker reported."""

    decode: Mapping[Incarnation, int]
    """Attempts by decode worker."""
    prefill: Mapping[str, int]
    """Attempts without a token yet, by the prefill endpoint preferred for them."""


def choose_route(
    registry: Registry,
    demand: Demand,
    tried: Collection[Incarnation],
    refused: Collection[Incarnation],
) -> Route | None:
    """The least loaded decode worker, or None when none can serve.

    Workers in `tried` come last; those in `refused`, which answered that they cannot, never.
    """
    candidates = [(w, paired) for w, paired in registry.decodes() if w.incarnation not in refused]
    if not candidates:
        return None
    worker, paired = min(
        candidates,
        key=lambda c: (c[0].incarnation in tried, *_decode_score(c[0], demand)),
    )
    usable = registry.prefills_for(worker)
    preferred = sorted(
        usable, key=lambda e: (e not in paired, *_prefill_score(usable[e], e, demand))
    )
    return Route(worker.incarnation, tuple(preferred[:ENDPOINTS_MAX]))


def _decode_score(worker: Worker, demand: Demand) -> tuple[float, float, int]:
    """Share of its requests in use, then share of its pages, then a fixed order."""
    register, load = worker.register, worker.register.load
    # The report lags behind our own count, but knows other gateways' requests.
    requests = max(demand.decode.get(worker.incarnation, 0), load.running + load.queued)
    pages = 1.0 - load.pages_free / load.pages_total if load.pages_total else 1.0
    return requests / max(1, register.requests_max), pages, worker.incarnation


def _prefill_score(worker: Worker, endpoint: str, demand: Demand) -> tuple[int, str]:
    load = worker.register.load
    return max(demand.prefill.get(endpoint, 0), load.running + load.queued), endpoint
