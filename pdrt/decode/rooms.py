"""The rooms of a decode worker: opening them for waiting requests, and what comes of them.

Ties lease table, page table and scheduler together; the one place where leased pages become free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.decode.handover import Handover, RoomEffect
from pdrt.errors import PoolExhausted
from pdrt.ids import RequestId, RoomId
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.observe.metrics import Metrics
from pdrt.protocol.effects import EndLease, FailRoom, LeaseReady, TakeFirstToken
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.leases import GrantRequest, LeaseState, LeaseTable
from pdrt.protocol.messages import TURNED_AWAY, Reason
from pdrt.scheduling.decode import DecodeRequest, DecodeScheduler

log = logging.getLogger(__name__)

FINISH_BY_REASON = {
    Reason.CLIENT_GONE: FinishReason.CANCELLED,
    Reason.DEADLINE: FinishReason.DEADLINE,
    Reason.REJECTED: FinishReason.REJECTED,
}
"""What the end of a room that cannot be retried means for its request; else FAILED."""
REVOKE_BY_FINISH = {
    FinishReason.STOP: Reason.FINISHED,
    FinishReason.LENGTH: Reason.FINISHED,
    FinishReason.DEADLINE: Reason.DEADLINE,
}
"""Why a room is revoked whose request has ended; else CLIENT_GONE."""


class RoomEvents(msgspec.Struct, frozen=True):
    """What the worker hears of its rooms."""

    on_token: Callable[[DecodeRequest, int, float], None]
    """The first token of a room has been sampled."""
    on_ready: Callable[[], None]
    """A sequence has joined: there is something to decode."""
    on_over: Callable[[DecodeRequest, FinishReason, str], None]
    """A request ends with its room: that failed, or nothing is left to decode."""


class _Room:
    """What the worker knows of one room beyond its lease."""

    def __init__(self, request: RequestId, pages: list[int]) -> None:
        self.request: RequestId | None = request
        """None once that has ended or gone on in another room."""
        self.pages = pages
        self.failed_at: float | None = None
        self.reason: Reason | None = None


class Rooms:
    """Every room of the lease table, with its pages and its request."""

    def __init__(
        self,
        table: LeaseTable,
        pages: PageTable,
        scheduler: DecodeScheduler,
        config: ProtocolConfig,
        metrics: Metrics,
    ) -> None:
        """`attach` must be called before anything is admitted."""
        self.table = table
        self.is_admitting = True
        """Cleared when the worker leaves."""
        self._pages = pages
        self._scheduler = scheduler
        self._config = config
        self._metrics = metrics
        # Exactly the rooms of the lease table.
        self._rooms: dict[RoomId, _Room] = {}
        self._is_admission_due = False

    def attach(self, handover: Handover, events: RoomEvents) -> None:
        """Where effects go, and who hears what comes of rooms."""
        self._handover = handover
        self._events = events

    # Admission

    def admit_soon(self) -> None:
        """Admit in the next turn of the loop: pages have become free, or a request waits."""
        if not self._is_admission_due:
            self._is_admission_due = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Open rooms for waiting requests, in order, while there are pages and a prefill worker."""
        self._is_admission_due = False
        now = time.monotonic()
        while self.is_admitting and (request := self._scheduler.head()) is not None:
            endpoint = self._choose(request)
            if endpoint is None or self.table.refuses(now):
                return
            written, leased = self._scheduler.pages_wanted(request)
            # A page for each running sequence stays free, or growth would preempt at once.
            if leased and self._pages.free_count - leased < self._scheduler.running:
                return
            try:
                pages = self._pages.take(leased, _lease(self.table.next_room()))
            except PoolExhausted:
                return
            self._open(request, endpoint, pages, written)

    def _choose(self, request: DecodeRequest) -> str | None:
        usable = self.table.usable_endpoints()
        preferred = [endpoint for endpoint in request.endpoints if endpoint in usable]
        # After a failed room the next one goes elsewhere, if there is an elsewhere.
        choices = preferred or usable
        return choices[request.rooms_failed % len(choices)] if choices else None

    def _open(self, request: DecodeRequest, endpoint: str, pages: list[int], written: int) -> None:
        room, now = self.table.next_room(), time.monotonic()
        grant = GrantRequest(
            pages=tuple(pages),
            written_pages=written,
            first_page=0,
            token_ids=tuple(request.tokens),
            output_tokens=request.output_tokens,
            sampling=request.sampling,
            seconds_max=request.deadline - now,
        )
        self._rooms[room] = _Room(request.request, pages)
        self._scheduler.admitted(request, room, now)
        self._handover.apply(self.table.grant(endpoint, grant, now))

    # What comes of them

    def apply(self, effect: RoomEffect) -> None:
        """An effect of the lease table that concerns requests and pages."""
        match effect:
            case TakeFirstToken():
                self._take_first_token(effect)
            case LeaseReady():
                self._ready(effect)
            case FailRoom():
                self._failed(effect)
            case EndLease():
                self._free(effect.room)

    def _request(self, room: RoomId) -> DecodeRequest | None:
        name = self._rooms[room].request
        return self._scheduler.requests[name] if name is not None else None

    def _take_first_token(self, effect: TakeFirstToken) -> None:
        request = self._request(effect.room)
        if request is None:
            return
        now = time.monotonic()
        if not request.output_tokens:
            self._metrics.observe_ttft(now - request.arrived_at)
        self._scheduler.first_token(request, effect.first.cached_tokens, now)
        self._events.on_token(request, effect.first.token, now)

    def _ready(self, effect: LeaseReady) -> None:
        """The KV has landed: leased pages become the sequence's, in this same step."""
        self._metrics.count_transfer("local", effect.bytes_written)
        request = self._request(effect.room)
        if request is not None and not self._scheduler.wants_token(request):
            self._events.on_over(request, FinishReason.LENGTH, "")
            request = None
        if request is None:
            # It ended with its first token. Every write has settled: the pages are quiet.
            self._free(effect.room)
            return
        pages = self._rooms.pop(effect.room).pages
        sequence = Owner(OwnerKind.SEQUENCE, request.request)
        self._pages.pass_on(pages, _lease(effect.room), sequence)
        self._scheduler.ready(request, pages, len(request.tokens) - 1, time.monotonic())
        self._events.on_ready()

    def _failed(self, effect: FailRoom) -> None:
        room, now = self._rooms[effect.room], time.monotonic()
        if effect.room in self.table.leases:
            # It is being revoked; one that has drained already has nothing left to wait for.
            room.failed_at, room.reason = now, effect.reason
        request = self._request(effect.room)
        if request is None:
            return
        room.request = None
        log.warning(
            "room failed",
            extra={
                "room": effect.room,
                "request": request.request,
                "reason": effect.reason.value,
                "detail": effect.detail or "-",
            },
        )
        is_turned_away = effect.reason in TURNED_AWAY
        if not is_turned_away:
            request.rooms_failed += 1
        if effect.retryable and request.rooms_failed < self._config.rooms_per_request_max:
            if not is_turned_away:
                self._metrics.count_recomputed_prompt_tokens(len(request.tokens))
            self._scheduler.requeue(request, now)
            self.admit_soon()
            return
        request.room = None
        reason = FINISH_BY_REASON.get(effect.reason, FinishReason.FAILED)
        detail = effect.detail or f"the hand-over failed: {effect.reason.value}"
        self._events.on_over(request, reason, detail)

    def detach(self, name: RoomId, finish: FinishReason) -> None:
        """Its request has ended. The room is revoked if it holds pages or still computes for
        nobody; one that is about to end by itself is left to."""
        room, lease = self._rooms[name], self.table.leases.get(name)
        room.request = None
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        reason = REVOKE_BY_FINISH.get(finish, Reason.CLIENT_GONE)
        if lease.pages or reason is not Reason.FINISHED:
            self._handover.apply(self.table.revoke(name, reason, time.monotonic()))

    def _free(self, name: RoomId) -> None:
        """The one place where leased pages become free: the lease is gone, its pages quiet."""
        room = self._rooms.pop(name)
        self._pages.free(room.pages, _lease(name))
        if room.failed_at is not None and room.reason is not None:
            seconds = time.monotonic() - room.failed_at
            self._metrics.observe_drain(seconds)
            log.info(
                "lease drained",
                extra={
                    "room": name,
                    "reason": room.reason.value,
                    "pages": len(room.pages),
                    "seconds": seconds,
                },
            )
        self.admit_soon()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._rooms.keys() == self.table.leases.keys()
        serving = {r.room: r.request for r in self._scheduler.requests.values() if r.room}
        known = {name: r.request for name, r in self._rooms.items() if r.request is not None}
        assert serving == known, (serving, known)


def _lease(room: RoomId) -> Owner:
    return Owner(OwnerKind.LEASE, room)
