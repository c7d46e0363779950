"""The rooms of a decode worker, from the grant to the end of the lease: what comes of each for its
request and its pages.

Ties lease table, pages and scheduler together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from pdrt.decode.handover import Handover, RoomEffect
from pdrt.decode.pages import DecodePages, RoomPages
from pdrt.ids import Incarnation, RequestId, RoomId, short
from pdrt.kv.layout import rank_heads
from pdrt.observe.metrics import Metrics
from pdrt.protocol.effects import EndLease, FailRoom, LeaseReady, PagesDiffer, TakeFirstToken
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.leases import GrantRequest, Lease, LeaseState, LeaseTable
from pdrt.protocol.messages import TURNED_AWAY, FirstTokenData, Reason
from pdrt.sampling import TokenLogprobs
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, End
from pdrt.scheduling.local_prefill import LocalPrefill

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

    on_free: Callable[[], None]
    """Pages have become free, or a request waits again."""
    on_token: Callable[[DecodeRequest, FirstTokenData, Incarnation, float], None]
    """The first token of a room has been sampled, by this writer."""
    on_scores: Callable[[DecodeRequest, tuple[TokenLogprobs, ...], Incarnation], None]
    """The prompt's log probabilities; before any token."""
    on_ready: Callable[[], None]
    """A sequence has joined: there is something to decode."""
    on_over: Callable[[DecodeRequest, End], None]
    """A request ends with its room: that failed, or nothing is left to decode."""


class _Room:
    """What the worker knows of one room beyond its lease."""

    def __init__(
        self,
        request: RequestId,
        pages: RoomPages,
        lease: Lease,
        short_since: float | None,
    ) -> None:
        self.request: RequestId | None = request
        """None once that has ended or gone on in another room."""
        self.pages = pages
        self.writer = lease.writer
        self.engine = lease.engine
        self.short_since = short_since
        """When it was opened, if its prompt is so short that it could have been computed here."""
        self.first: FirstTokenData | None = None
        """Kept back until the prompt's log probabilities are there."""
        self.failed_at: float | None = None
        self.reason: Reason | None = None


class Rooms:
    """Every room of the lease table, with its pages and its request."""

    def __init__(
        self,
        table: LeaseTable,
        pages: DecodePages,
        scheduler: DecodeScheduler,
        local: LocalPrefill,
        metrics: Metrics,
    ) -> None:
        """`attach` must be called before any room is opened."""
        self.table = table
        self._pages = pages
        self._scheduler = scheduler
        self._local = local
        self._metrics = metrics
        # Exactly the rooms of the lease table.
        self._rooms: dict[RoomId, _Room] = {}

    def attach(self, handover: Handover, events: RoomEvents) -> None:
        """Where effects go, and who hears what comes of rooms."""
        self._handover = handover
        self._events = events

    def open(
        self, request: DecodeRequest, endpoint: str, pages: RoomPages, short_since: float | None
    ) -> None:
        """The room `table.next_room()`, which `pages` are leased to. `short_since`: now, if the
        prompt is so short that it could have been computed here."""
        room, now = self.table.next_room(), time.monotonic()
        grant = GrantRequest(
            pages=pages.own,
            written_pages=pages.written,
            first_page=len(pages.held),
            token_ids=tuple(request.tokens),
            output_tokens=request.output_tokens,
            sampling=self._scheduler.room_sampling(request),
            seconds_max=request.deadline - now,
            cache_salt=request.cache_salt,
            context=request.context,
        )
        effects = self.table.grant(endpoint, grant, now)
        lease = self.table.leases[room]
        opened = self._rooms[room] = _Room(request.request, pages, lease, short_since)
        self._scheduler.admitted(request, room, now)
        self._handover.apply(effects)
        # Now that its writer has it.
        opened.pages = self._pages.keyed(pages, request)

    # What comes of them

    def apply(self, effect: RoomEffect) -> None:
        """An effect of the lease table that concerns requests and pages."""
        match effect:
            case TakeFirstToken():
                self._take_first_token(effect)
            case PagesDiffer():
                self._differ(effect)
            case LeaseReady():
                self._ready(effect)
            case FailRoom():
                self._failed(effect)
            case EndLease():
                self._end_lease(effect.room)

    def _request(self, room: RoomId) -> DecodeRequest | None:
        name = self._rooms[room].request
        return self._scheduler.requests[name] if name is not None else None

    def _take_first_token(self, effect: TakeFirstToken) -> None:
        request = self._request(effect.room)
        if request is None:
            return
        room, now = self._rooms[effect.room], time.monotonic()
        self._scheduler.first_token(request, effect.first.cached_tokens, now)
        if request.awaits_scores:
            # They come first: a room that fails before they are there has told nothing.
            room.first = effect.first
        else:
            self._tell_first_token(request, effect.first, room.writer, now)

    def _tell_first_token(
        self, request: DecodeRequest, first: FirstTokenData, writer: Incarnation, now: float
    ) -> None:
        if not request.output_tokens:
            self._metrics.observe_ttft(now - request.arrived_at)
        self._events.on_token(request, first, writer, now)

    def _ready(self, effect: LeaseReady) -> None:
        """The KV has landed: the room's pages become the sequence's, in this same step."""
        room, now = self._rooms[effect.room], time.monotonic()
        self._count_landed(room.engine, effect.bytes_written)
        if self.table.pairing.fingerprint.kv_checksum:
            self._metrics.count_checksum_pages("equal", room.pages.written)
        self._pages.landed(effect.room, room.pages)
        if (request := self._request(effect.room)) is not None and request.awaits_scores:
            request.awaits_scores = False
            self._events.on_scores(request, effect.prompt_logprobs, room.writer)
            if room.first is not None:
                self._tell_first_token(request, room.first, room.writer, now)
        request = self._request(effect.room)
        if request is not None and not self._scheduler.wants_token(request):
            self._events.on_over(request, End(FinishReason.LENGTH))
            request = None
        if request is None:
            # It ended with its first token. Every write has settled: the pages are quiet.
            self._end_lease(effect.room)
            return
        del self._rooms[effect.room]
        self._pages.pass_on(effect.room, room.pages, request.request)
        self._scheduler.ready(request, room.pages.all, len(request.tokens) - 1, time.monotonic())
        if room.short_since is not None:
            self._local.handed_over(now - room.short_since)
        self._events.on_ready()

    def _count_landed(self, engine: str, bytes_written: int) -> None:
        """By rank: each has its own heads of the very same pages."""
        pairing = self.table.pairing
        heads = rank_heads(pairing.fingerprint.layout.kv_heads, pairing.ranks)
        all_heads = sum(held.count for held in heads)
        for rank, held in enumerate(heads):
            self._metrics.count_transfer(engine, bytes_written * held.count // all_heads, rank)

    def _differ(self, effect: PagesDiffer) -> None:
        self._metrics.count_checksum_pages("different", len(effect.pages))
        log.error(
            "what landed is not what was sent",
            extra={
                "room": effect.room,
                "writer": short(effect.writer),
                "page_indices": effect.indices,
                "pages": effect.pages,
            },
        )

    def _failed(self, effect: FailRoom) -> None:
        room, now = self._rooms[effect.room], time.monotonic()
        self._metrics.count_room_end(effect.reason.value)
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
                # A refusal may quote the client.
                "detail": "-" if effect.reason is Reason.REJECTED else effect.detail or "-",
            },
        )
        is_turned_away = effect.reason in TURNED_AWAY
        if not is_turned_away:
            request.rooms_failed += 1
        if effect.retryable and self._local.goes_on(request, effect.reason):
            if not is_turned_away:
                self._metrics.count_recomputed_prompt_tokens(len(request.tokens))
            self._scheduler.requeue(request, now)
            self._events.on_free()
            return
        request.room = None
        reason = FINISH_BY_REASON.get(effect.reason, FinishReason.FAILED)
        detail = effect.detail or f"the hand-over failed: {effect.reason.value}"
        self._events.on_over(request, End(reason, detail))

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

    def _end_lease(self, name: RoomId) -> None:
        room = self._rooms.pop(name)
        self._pages.end_lease(name, room.pages)
        if room.failed_at is not None and room.reason is not None:
            seconds = time.monotonic() - room.failed_at
            self._metrics.observe_drain(seconds)
            log.info(
                "lease drained",
                extra={
                    "room": name,
                    "reason": room.reason.value,
                    "pages": len(room.pages.own),
                    "seconds": seconds,
                },
            )
        self._events.on_free()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._rooms.keys() == self.table.leases.keys()
        for name, room in self._rooms.items():
            assert self.table.leases[name].pages == room.pages.own, name
        self._pages.check_rooms({name: room.pages for name, room in self._rooms.items()})
        serving = {r.room: r.request for r in self._scheduler.requests.values() if r.room}
        known = {name: r.request for name, r in self._rooms.items() if r.request is not None}
        assert serving == known, (serving, known)
