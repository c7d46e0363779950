"""Admission on a decode worker: waiting requests, in order, get a room each, or are computed here.

Asks lease table, pages and scheduler in turn. All that happens in one turn of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from pdrt.decode.pages import DecodePages
from pdrt.decode.rooms import Rooms
from pdrt.observe.metrics import Metrics
from pdrt.protocol.leases import LeaseTable
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, LocalReason
from pdrt.scheduling.local_prefill import PROMPTS_MAX, LocalPrefill
from pdrt.transfer.liveness import Liveness


class Admitting(Protocol):
    """The parts of a decode worker that admission needs."""

    table: LeaseTable
    kv: DecodePages
    scheduler: DecodeScheduler
    local: LocalPrefill
    rooms: Rooms
    metrics: Metrics
    liveness: Liveness


class Admission:
    """Decides who is next, and where its prompt is computed."""

    def __init__(self, worker: Admitting, on_ready: Callable[[], None]) -> None:
        """`on_ready`: a prompt is to be computed here."""
        self.is_on = True
        """Cleared when the worker leaves."""
        self._worker = worker
        self._on_ready = on_ready
        self._is_due = False

    def admit_soon(self) -> None:
        """Admit in the next turn of the loop: pages have become free, or a request waits."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """As long as there are pages, and somebody to compute prompts."""
        self._is_due = False
        worker, now = self._worker, time.monotonic()
        while self.is_on and (request := worker.scheduler.head()) is not None:
            if worker.table.refuses(now) or not self._admit_one(request, now):
                return
            worker.liveness.moved()

    def _admit_one(self, request: DecodeRequest, now: float) -> bool:
        """False when it must go on waiting."""
        local, endpoint = self._worker.local, self._choose(request)
        why = local.why(request, is_paired=endpoint is not None, now=now)
        if why is not None:
            return self._begin_here(request, why, now)
        if endpoint is None:
            return False
        if not self._is_short(request):
            return self._lease(request, endpoint, short_since=None)
        if local.takes_short() and self._begin_here(request, LocalReason.SHORT, now):
            return True
        return self._lease(request, endpoint, short_since=now)

    def _is_short(self, request: DecodeRequest) -> bool:
        limit = self._worker.local.short_tokens_max
        # The look-up hashes the whole prompt: only where it matters.
        return limit > 0 and self._worker.kv.uncached_tokens(request) <= limit

    def _choose(self, request: DecodeRequest) -> str | None:
        table = self._worker.table
        # Of the few that are named, if one will do: this is asked for each room.
        preferred = [name for name in request.endpoints if table.is_usable(name)]
        # After a failed room the next one goes elsewhere, if there is an elsewhere.
        choices = preferred or table.usable_endpoints()
        return choices[request.rooms_failed % len(choices)] if choices else None

    def _begin_here(self, request: DecodeRequest, why: LocalReason, now: float) -> bool:
        """Its prompt is computed by steps of this worker, in pages of its own: nobody else writes
        into them, so that they need no lease."""
        worker = self._worker
        if worker.scheduler.prompts_here >= PROMPTS_MAX:
            return False
        wanted = worker.scheduler.pages_here(request)
        begin = worker.kv.begin(request, wanted, worker.scheduler.running)
        if begin is None:
            return False
        worker.scheduler.begin_here(request, why, begin.pages, begin.cached_tokens, now)
        worker.metrics.count_local_prefill_request(why.value)
        self._on_ready()
        return True

    def _lease(self, request: DecodeRequest, endpoint: str, short_since: float | None) -> bool:
        """Open a room, if there are pages."""
        worker = self._worker
        room, wanted = worker.table.next_room(), worker.scheduler.pages_wanted(request)
        # A page for each running sequence stays available, or growth would preempt at once.
        pages = worker.kv.lease(request, room, wanted, worker.scheduler.running)
        if pages is None:
            return False
        worker.rooms.open(request, endpoint, pages, short_since)
        return True
