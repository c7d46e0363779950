"""The decode leader's half of the hand-over: who may write into which of its pages. Pure.

    GRANTED   a writer may write; its end is awaited
    REVOKING  no longer wanted; `Revoke` is resent until the writer has drained or is fenced
    (gone)    READY: the pages pass to the sequence; FREED: they are free

A page leaves a lease for the free list only when its writer has drained with a settled outcome,
or has been fenced on every decode rank. Time never frees a page: it resends, alarms, and sets
off fences.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.context import RequestContext
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.checksums import cover, differing
from pdrt.protocol.effects import (
    ChecksumPages,
    DecodeEffect,
    EndLease,
    FailRoom,
    LeaseReady,
    PagesDiffer,
    SendToPrefill,
    TakeFirstToken,
)
from pdrt.protocol.messages import (
    NOT_RETRYABLE,
    TURNED_AWAY,
    Drained,
    FirstToken,
    FirstTokenData,
    Grant,
    Load,
    Outcome,
    PrefillToDecode,
    Reason,
    Revoke,
    Segment,
    SliceChecksums,
    Welcome,
)
from pdrt.protocol.pairing import (
    DecodeWorkerInfo,
    GenerationRetired,
    Pairing,
    PairingEffect,
    WriterDied,
    WriterLost,
    WriterWelcomed,
)
from pdrt.protocol.ranks import RankWatch
from pdrt.protocol.writers import FenceKind, WriterPeer
from pdrt.sampling import Sampling

WELCOMES_MISSED_MAX = 2
"""A granted room missing from this many answers to newer `Hello`s was lost on the way."""


class LeaseState(Enum):
    GRANTED = "granted"
    REVOKING = "revoking"
    READY = "ready"
    FREED = "freed"


class LeaseEvent(Enum):
    FIRST_TOKEN = "first_token"
    COMPLETE = "complete"
    """Drained, everything has landed, and the first token is known."""
    ENDED = "ended"
    """Drained, settled, without what was wanted."""
    UNSETTLED = "unsettled"
    REVOKED = "revoked"
    FENCED = "fenced"


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.GRANTED, LeaseEvent.FIRST_TOKEN): LeaseState.GRANTED,
    (LeaseState.GRANTED, LeaseEvent.COMPLETE): LeaseState.READY,
    (LeaseState.GRANTED, LeaseEvent.ENDED): LeaseState.FREED,
    (LeaseState.GRANTED, LeaseEvent.UNSETTLED): LeaseState.REVOKING,
    (LeaseState.GRANTED, LeaseEvent.REVOKED): LeaseState.REVOKING,
    (LeaseState.GRANTED, LeaseEvent.FENCED): LeaseState.FREED,
    # Too late for its tokens to count; what it proves about the pages counts.
    (LeaseState.REVOKING, LeaseEvent.COMPLETE): LeaseState.FREED,
    (LeaseState.REVOKING, LeaseEvent.ENDED): LeaseState.FREED,
    (LeaseState.REVOKING, LeaseEvent.UNSETTLED): LeaseState.REVOKING,
    (LeaseState.REVOKING, LeaseEvent.REVOKED): LeaseState.REVOKING,
    (LeaseState.REVOKING, LeaseEvent.FENCED): LeaseState.FREED,
}
"""An event that is not listed raises and changes nothing."""


class GrantRequest(msgspec.Struct, frozen=True):
    """What the decode scheduler asks of a prefill worker."""

    pages: tuple[int, ...]
    """All destination pages leased to the room; the writer is told of the first
    `written_pages` only (the others are for tokens that decode itself computes)."""
    written_pages: int
    first_page: int
    token_ids: tuple[int, ...]
    output_tokens: int
    sampling: Sampling
    seconds_max: float
    cache_salt: str = ""
    context: RequestContext = RequestContext()


class Lease:
    """One room's destination pages and what is known of their writer."""

    def __init__(self, peer: WriterPeer, grant: Grant, request: GrantRequest, now: float) -> None:
        assert peer.engine is not None and peer.fence_kind is not None, grant.room
        self.room = grant.room
        self.endpoint = peer.endpoint
        self.writer = grant.writer
        self.generation = grant.generation
        self.engine = peer.engine
        """What its writer writes through; fixed, as is what fences it."""
        self.fence = peer.fence_kind
        self.pages = request.pages
        self.written = grant.pages
        """Those of them that the writer fills."""
        self.first_page = grant.first_page
        self.needs_token = request.sampling.max_tokens > request.output_tokens
        self.state = LeaseState.GRANTED
        self.granted_at = now
        self.grant_seq = grant.seq
        self.first: FirstTokenData | None = None
        """Set at most once, and only while GRANTED."""
        self.welcomes_missed = 0
        self.is_answered = False
        """The writer has said how it ended: resending a `Revoke` is of no use. What is left is a
        comparison of checksums or, after UNSETTLED, a fence."""
        self.drained: Drained | None = None
        """COMPLETE, while its checksums are being compared: until then it does not count."""
        self.uncompared: set[int] = set()
        """Ranks whose checksums are awaited. Empty unless `drained` is set."""
        # Of REVOKING only:
        self.revoking_at = 0.0
        self.reason: Reason | None = None
        self.fence_at = float("inf")
        """When a fence is due. Moved towards now, and away from it only by sleep of our own."""
        self.fence_reason = ""
        self.resend_at = 0.0
        self.resend_pause = 0.0


class LeaseTable:
    """Every lease of one decode worker, over its `Pairing`. Methods are events; each returns
    effects, which the worker applies in order before the next event."""

    def __init__(self, worker: DecodeWorkerInfo, config: ProtocolConfig, now: float) -> None:
        self.pairing = Pairing(worker, config, now)
        self.leases: dict[RoomId, Lease] = {}
        self.stale: Counter[str] = self.pairing.stale
        """Messages that changed nothing, by reason."""
        self.fences_by_engine: Counter[str] = Counter()
        """Generations retired or writers killed to get pages back."""
        self._config = config
        self._quarantine_pages_max = worker.quarantine_pages_max
        self._ranks = RankWatch(worker.ranks, config, now)
        self._serial = 0
        # The same leases by endpoint; no empty entries.
        self._by_endpoint: dict[str, dict[RoomId, Lease]] = {}
        # Exactly the leases in REVOKING, in the order of their revocation.
        self._revoking: dict[RoomId, Lease] = {}

    @property
    def fences(self) -> int:
        """All of them."""
        return self.fences_by_engine.total()

    # Pairing

    def want(self, endpoint: str, now: float) -> list[DecodeEffect]:
        """Pair with whoever answers on `endpoint`. Idempotent."""
        return self._resolve(self.pairing.want(endpoint, now), now)

    def unwant(self, endpoint: str) -> None:
        """Let `endpoint` go, once nothing here needs it."""
        self.pairing.unwant(endpoint)

    def segment_opened(
        self, endpoint: str, generation: int, rank: int, segments: tuple[Segment, ...], now: float
    ) -> list[DecodeEffect]:
        """One rank's answer to `OpenSegment`: a segment for each engine."""
        return self._resolve(
            self.pairing.segment_opened(endpoint, generation, rank, segments, now), now
        )

    def segment_closed(
        self, endpoint: str, generation: int, rank: int, now: float
    ) -> list[DecodeEffect]:
        """One rank's answer to `CloseSegment`: nobody can write through it any more."""
        return self._resolve(self.pairing.segment_closed(endpoint, generation, rank, now), now)

    def fence_opened(self, endpoint: str, writer: Incarnation) -> list[DecodeEffect]:
        """Answer to `OpenFence`."""
        self.pairing.fence_opened(endpoint, writer)
        return []

    def fence_refused(self, endpoint: str, writer: Incarnation, why: str) -> list[DecodeEffect]:
        """Answer to `OpenFence`."""
        self.pairing.fence_refused(endpoint, writer, why)
        return []

    def writer_dead(self, endpoint: str, writer: Incarnation, now: float) -> list[DecodeEffect]:
        """Every process of `writer` is gone, whoever ended it."""
        return self._resolve(self.pairing.writer_dead(endpoint, writer, now), now)

    # Grants

    def usable_endpoints(self) -> list[str]:
        """Endpoints that a grant may go to now."""
        return [e for e, peer in self.pairing.peers.items() if peer.is_usable()]

    def is_usable(self, endpoint: str) -> bool:
        """A grant may go to `endpoint` now."""
        peer = self.pairing.peers.get(endpoint)
        return peer is not None and peer.is_usable()

    def quarantined_pages(self, now: float) -> int:
        """Pages of leases that have been REVOKING longer than the bound."""
        oldest = now - self._config.quarantine_after_seconds
        return sum(len(x.pages) for x in self._revoking.values() if x.revoking_at < oldest)

    def refuses(self, now: float) -> str | None:
        """Why nothing may be granted at all just now, in words; None when it may."""
        if self.quarantined_pages(now) >= self._quarantine_pages_max:
            return (
                f"{self.quarantined_pages(now)} pages are quarantined "
                f"({self._quarantine_pages_max} allowed): they come back as their writers drain, "
                "or are fenced"
            )
        if len(self.leases) >= self._config.rooms_max:
            return f"{len(self.leases)} rooms are alive (rooms_max)"
        return None

    def next_room(self) -> RoomId:
        """The name of the room that the next `grant` opens, to lease its pages under."""
        return RoomId(self.pairing.incarnation, self._serial + 1)

    def grant(self, endpoint: str, request: GrantRequest, now: float) -> list[DecodeEffect]:
        """Open the room `next_room()`; `endpoint` must be usable and nothing refused."""
        peer = self.pairing.peers[endpoint]
        assert peer.is_usable() and peer.writer is not None, endpoint
        assert len(self.leases) < self._config.rooms_max
        room = self.next_room()
        self._serial += 1
        grant = Grant(
            room=room,
            writer=peer.writer,
            seq=self.pairing.next_seq(),
            generation=peer.newest_generation,
            pages=request.pages[: request.written_pages],
            first_page=request.first_page,
            token_ids=request.token_ids,
            output_tokens=request.output_tokens,
            sampling=request.sampling,
            seconds_max=request.seconds_max,
            cache_salt=request.cache_salt,
            context=request.context,
        )
        lease = self.leases[room] = Lease(peer, grant, request, now)
        self._by_endpoint.setdefault(endpoint, {})[room] = lease
        return [SendToPrefill(endpoint, grant)]

    def revoke(self, room: RoomId, reason: Reason, now: float) -> list[DecodeEffect]:
        """Withdraw a lease. Nothing happens when it is being revoked already."""
        lease = self.leases[room]
        if lease.state is LeaseState.REVOKING:
            return []
        return self._revoke(lease, reason, now)

    # Messages

    def receive(self, endpoint: str, message: PrefillToDecode, now: float) -> list[DecodeEffect]:
        """A message that came in from `endpoint`. Stale ones change nothing and are counted."""
        match message:
            case Welcome():
                return self._resolve(self.pairing.welcome(endpoint, message, now), now)
            case FirstToken():
                return self._first_token(message)
            case Drained():
                return self._drained(message, now)

    def _addressed(self, message: FirstToken | Drained) -> Lease | None:
        lease = self.leases.get(message.room)
        if lease is None:
            self.stale["unknown_room"] += 1
            return None
        if message.writer != lease.writer:
            self.stale["other_writer"] += 1
            return None
        return lease

    def _first_token(self, message: FirstToken) -> list[DecodeEffect]:
        lease = self._addressed(message)
        if lease is None:
            return []
        if lease.state is not LeaseState.GRANTED or lease.first or not lease.needs_token:
            self.stale["first_token"] += 1
            return []
        return self._take_first(lease, message.first)

    def _take_first(self, lease: Lease, first: FirstTokenData) -> list[DecodeEffect]:
        self._enter(lease, LeaseEvent.FIRST_TOKEN)
        lease.first = first
        return [TakeFirstToken(lease.room, first)]

    def _drained(self, message: Drained, now: float) -> list[DecodeEffect]:
        lease = self._addressed(message)
        if lease is None:
            return []
        if lease.is_answered:
            self.stale["drained_again"] += 1
            return []
        match message.outcome:
            case Outcome.UNSETTLED:
                failure = message.reason or Reason.WRITE_UNSETTLED, message.detail
                why = "its writer reported a write that has not settled"
                return self._unsettled(lease, failure, message.retryable, why, now)
            case Outcome.COMPLETE if self.pairing.fingerprint.kv_checksum and lease.written:
                return self._compare(lease, message, now)
            case Outcome.COMPLETE:
                return self._complete(lease, message, now)
            case Outcome.ENDED:
                reason = message.reason or Reason.UNKNOWN_ROOM
                return self._end(lease, reason, message.retryable, message.detail, now)

    def _complete(self, lease: Lease, message: Drained, now: float) -> list[DecodeEffect]:
        if lease.state is LeaseState.REVOKING:
            return self._free(lease, LeaseEvent.COMPLETE, now)
        effects: list[DecodeEffect] = []
        if lease.needs_token and lease.first is None:
            if message.first is None:
                # Clean pages, but nothing to go on with: as good as a failure.
                return self._end(lease, Reason.NO_FIRST_TOKEN, True, message.detail, now)
            effects += self._take_first(lease, message.first)
        self._enter(lease, LeaseEvent.COMPLETE)
        self._remove(lease)
        return [
            *effects,
            LeaseReady(lease.room, message.bytes_written, message.prompt_logprobs),
            *self._let_go(lease.endpoint, now),
        ]

    def _compare(self, lease: Lease, message: Drained, now: float) -> list[DecodeEffect]:
        """With `--kv-checksum`, COMPLETE counts once every rank holds what was sent."""
        lease.is_answered = True
        layout, count = self.pairing.fingerprint.layout, len(lease.written)
        if not cover(message.checksums, layout, self.pairing.ranks, count):
            return self._differ(lease, tuple(range(count)), now)
        lease.drained = message
        lease.uncompared = set(range(self.pairing.ranks))
        return [ChecksumPages(lease.room, lease.written, message.checksums)]

    def checksummed(
        self, room: RoomId, rank: int, landed: tuple[SliceChecksums, ...], now: float
    ) -> list[DecodeEffect]:
        """One rank's answer to `ChecksumPages`: of the slices that are its own, in their order."""
        lease = self.leases.get(room)
        if lease is None or lease.drained is None or rank not in lease.uncompared:
            self.stale["checksummed"] += 1
            return []
        message = lease.drained
        sent = [x for x in message.checksums if x.decode_rank == rank]
        if wrong := differing(sent, landed):
            return self._differ(lease, wrong, now)
        lease.uncompared.remove(rank)
        if lease.uncompared:
            return []
        lease.drained = None
        return self._complete(lease, message, now)

    def _differ(self, lease: Lease, wrong: tuple[int, ...], now: float) -> list[DecodeEffect]:
        """An engine that has said COMPLETE of bytes that are not there is not believed when it says
        that nothing of them can still land: these pages wait for a fence."""
        lease.drained = None
        lease.uncompared.clear()
        indices = tuple(lease.first_page + index for index in wrong)
        pages = tuple(lease.written[index] for index in wrong)
        detail = f"{len(wrong)} of {len(lease.written)} pages do not hold what was sent"
        failure = Reason.CHECKSUM_MISMATCH, detail
        why = "what landed is not what it said it had written"
        told = PagesDiffer(lease.room, lease.writer, indices, pages)
        return [told, *self._unsettled(lease, failure, True, why, now)]

    def _end(
        self, lease: Lease, reason: Reason, retryable: bool, detail: str, now: float
    ) -> list[DecodeEffect]:
        if reason in TURNED_AWAY:
            self.pairing.turned_away(lease.endpoint, lease.writer, now)
        failed = self._fail(lease, reason, retryable, detail)
        return [*failed, *self._free(lease, LeaseEvent.ENDED, now)]

    def _unsettled(
        self, lease: Lease, failure: tuple[Reason, str], retryable: bool, why: str, now: float
    ) -> list[DecodeEffect]:
        """`why`: there must be a fence."""
        effects: list[DecodeEffect] = []
        if lease.state is LeaseState.GRANTED:
            reason, detail = failure
            effects += self._fail(lease, reason, retryable, detail)
            self._enter(lease, LeaseEvent.UNSETTLED)
            self._start_revoking(lease, reason, now)
        else:
            self._enter(lease, LeaseEvent.UNSETTLED)
        lease.is_answered = True
        self._fence_by(lease, now, why)
        return [*effects, *self._fence_due(lease.endpoint, now)]

    # Revoking and freeing

    def _revoke(self, lease: Lease, reason: Reason, now: float) -> list[DecodeEffect]:
        effects = self._fail(lease, reason, reason not in NOT_RETRYABLE, "")
        self._enter(lease, LeaseEvent.REVOKED)
        self._start_revoking(lease, reason, now)
        return effects if lease.is_answered else [*effects, *self._send_revoke(lease, now)]

    def _fail(
        self, lease: Lease, reason: Reason, retryable: bool, detail: str
    ) -> list[DecodeEffect]:
        """The request behind the lease hears of it once: when the lease leaves GRANTED."""
        if lease.state is not LeaseState.GRANTED:
            return []
        return [FailRoom(lease.room, reason, retryable, detail)]

    def _start_revoking(self, lease: Lease, reason: Reason, now: float) -> None:
        lease.reason = reason
        lease.revoking_at = now
        lease.resend_pause = self._config.revoke_resend_seconds
        self._revoking[lease.room] = lease
        self._fence_by(lease, now + self._config.fence_after_seconds, "its writer does not drain")

    def _send_revoke(self, lease: Lease, now: float) -> list[DecodeEffect]:
        assert lease.reason is not None, lease.room
        lease.resend_at = now + lease.resend_pause
        lease.resend_pause = min(2 * lease.resend_pause, self._config.revoke_resend_seconds_max)
        revoke = Revoke(
            room=lease.room,
            writer=lease.writer,
            seq=self.pairing.next_seq(),
            generation=lease.generation,
            reason=lease.reason,
        )
        return [SendToPrefill(lease.endpoint, revoke)]

    def _free(self, lease: Lease, event: LeaseEvent, now: float) -> list[DecodeEffect]:
        self._enter(lease, event)
        assert lease.state is LeaseState.FREED, lease.state
        self._remove(lease)
        return [EndLease(lease.room), *self._let_go(lease.endpoint, now)]

    def _remove(self, lease: Lease) -> None:
        del self.leases[lease.room]
        self._revoking.pop(lease.room, None)
        here = self._by_endpoint[lease.endpoint]
        del here[lease.room]
        if not here:
            del self._by_endpoint[lease.endpoint]

    def _enter(self, lease: Lease, event: LeaseEvent) -> None:
        assert (lease.state, event) in TRANSITIONS, (lease.room, lease.state, event)
        lease.state = TRANSITIONS[lease.state, event]

    # Fences

    def _fence_by(self, lease: Lease, when: float, reason: str) -> None:
        if when < lease.fence_at:
            lease.fence_at, lease.fence_reason = when, reason

    def _fence_due(self, endpoint: str, now: float) -> list[DecodeEffect]:
        due = [x for x in self._at(endpoint) if now >= x.fence_at]
        effects: list[DecodeEffect] = []
        for lease in due:
            if lease.room not in self.leases:
                continue
            if not lease.pages and not lease.is_answered:
                # Nothing was ever exposed to this writer: there is nothing to fence. One that
                # has answered UNSETTLED is fenced all the same, as it takes no more grants on
                # this generation.
                effects += self._free(lease, LeaseEvent.FENCED, now)
            else:
                effects += self._resolve(self._start_fence(lease, now), now)
        return effects

    def _start_fence(self, lease: Lease, now: float) -> list[PairingEffect]:
        match lease.fence:
            case FenceKind.PROCESS_DEATH:
                started = self.pairing.kill(lease.endpoint, lease.writer, lease.fence_reason)
            case FenceKind.RETIRE_GENERATION:
                peer = self.pairing.peers[lease.endpoint]
                if lease.generation != peer.newest_generation:
                    return []
                started = self.pairing.retire(lease.endpoint, now)
        if started:
            self.fences_by_engine[lease.engine] += 1
        return started

    def _writer_lost(self, notice: WriterLost, now: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
        for lease in self._of(notice.endpoint, notice.writer):
            if lease.state is LeaseState.GRANTED:
                effects += self._revoke(lease, Reason.WRITER_LOST, now)
            # A process is spared for a while, as its death costs more than a generation.
            is_killed = lease.fence is FenceKind.PROCESS_DEATH
            patience = self._config.kill_lost_after_seconds if is_killed else 0.0
            self._fence_by(lease, now + patience, "its writer is lost")
        return [*effects, *self._fence_due(notice.endpoint, now)]

    def _writer_died(self, notice: WriterDied, now: float) -> list[DecodeEffect]:
        effects = self._writer_lost(WriterLost(notice.endpoint, notice.writer), now)
        for lease in self._of(notice.endpoint, notice.writer):
            if lease.fence is FenceKind.PROCESS_DEATH:
                effects += self._free(lease, LeaseEvent.FENCED, now)
        return effects

    def _generation_retired(self, notice: GenerationRetired, now: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
        for lease in self._at(notice.endpoint):
            is_fenced = lease.fence is FenceKind.RETIRE_GENERATION
            if is_fenced and lease.generation == notice.generation:
                effects += self._fail(lease, Reason.FENCED, True, "its generation was retired")
                effects += self._free(lease, LeaseEvent.FENCED, now)
        # A lease on the next generation may have been waiting for its turn.
        return [*effects, *self._fence_due(notice.endpoint, now)]

    def _of(self, endpoint: str, writer: Incarnation) -> list[Lease]:
        return [lease for lease in self._at(endpoint) if lease.writer == writer]

    def _at(self, endpoint: str) -> list[Lease]:
        return list(self._by_endpoint.get(endpoint, {}).values())

    def _let_go(self, endpoint: str, now: float) -> list[DecodeEffect]:
        """After a lease is gone: means to fence, and endpoints, that nothing needs any more."""
        peer = self.pairing.peers[endpoint]
        if peer.is_wanted and len(peer.fences) <= 1:
            return []
        here = self._at(endpoint)
        effects = self.pairing.let_go(endpoint, {x.writer for x in here})
        if not here:
            effects += self.pairing.disconnect(endpoint, now)
        return self._resolve(effects, now)

    # Pairing's notices

    def _resolve(self, effects: list[PairingEffect], now: float) -> list[DecodeEffect]:
        """Turn the pairing's notices into what they mean for leases."""
        resolved: list[DecodeEffect] = []
        for effect in effects:
            match effect:
                case WriterLost():
                    resolved += self._writer_lost(effect, now)
                case WriterDied():
                    resolved += self._writer_died(effect, now)
                case GenerationRetired():
                    resolved += self._generation_retired(effect, now)
                case WriterWelcomed():
                    resolved += self._find_lost_grants(effect, now)
                case _:
                    resolved.append(effect)
        return resolved

    def _find_lost_grants(self, notice: WriterWelcomed, now: float) -> list[DecodeEffect]:
        alive = set(notice.welcome.rooms)
        effects: list[DecodeEffect] = []
        for lease in self._of(notice.endpoint, notice.welcome.writer):
            if lease.state is not LeaseState.GRANTED or lease.is_answered:
                continue
            if lease.grant_seq >= notice.welcome.seq:
                continue
            is_missing = lease.room.serial not in alive
            lease.welcomes_missed = lease.welcomes_missed + 1 if is_missing else 0
            if lease.welcomes_missed >= WELCOMES_MISSED_MAX:
                effects += self._revoke(lease, Reason.GRANT_LOST, now)
        return effects

    # Time

    def handle_timer(self, now: float) -> list[DecodeEffect]:
        """Every `TICK_SECONDS`, after everything inbound has been read."""
        notices = self.pairing.handle_timer(now)
        self._do_not_age(self.pairing.slept_seconds, now)
        effects = self._resolve(notices, now)
        for lease in list(self._revoking.values()):
            if lease.room in self.leases and not lease.is_answered and now >= lease.resend_at:
                effects += self._send_revoke(lease, now)
        for endpoint in dict.fromkeys(x.endpoint for x in self._revoking.values()):
            effects += self._fence_due(endpoint, now)
        for endpoint in self.pairing.attended():
            effects += self._let_go(endpoint, now)
        effects += self._ranks.handle_timer(now)
        return effects

    def _do_not_age(self, slept_seconds: float, now: float) -> None:
        """Whoever sleeps cannot read the answer to a `Revoke`, and cannot send it again."""
        for lease in self._revoking.values():
            if lease.fence_at > now - slept_seconds:
                shift = min(slept_seconds, now - lease.revoking_at)
                lease.revoking_at += shift
                lease.fence_at += shift

    def rank_heard(self, rank: int, now: float) -> None:
        """A sign of life of another rank of this worker."""
        self._ranks.heard(rank, now)

    def set_load(self, load: Load) -> None:
        """What the next `Hello`s say."""
        self.pairing.load = load

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself."""
        self.pairing.check()
        assert self._revoking.keys() <= self.leases.keys()
        indexed = {room: x for here in self._by_endpoint.values() for room, x in here.items()}
        assert indexed == self.leases
        seen: set[int] = set()
        for room, lease in self.leases.items():
            assert lease.state in (LeaseState.GRANTED, LeaseState.REVOKING), (room, lease.state)
            assert (lease.state is LeaseState.REVOKING) == (room in self._revoking), room
            assert seen.isdisjoint(lease.pages), (room, "a page in two leases")
            seen.update(lease.pages)
            assert room.serial <= self._serial, room
            assert (lease.drained is not None) == bool(lease.uncompared), room
            assert lease.is_answered or lease.drained is None, room
            if lease.fence is FenceKind.RETIRE_GENERATION:
                peer = self.pairing.peers[lease.endpoint]
                assert lease.generation >= peer.floor, (room, lease.generation, peer.floor)
