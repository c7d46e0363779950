"""The prefill leader's half of the hand-over: rooms, and the decode workers behind them. Pure.

    OPEN     computed and written on every rank
    CLOSING  one rank ended other than COMPLETE, or somebody withdrew; every rank drains
    (gone)   every named rank has ended, and `Drained` has said so

Source pages leave a room only when every rank has drained it and, where a write never settled,
the engine instance that carried it is destroyed.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.decode_peers import DecodePeer, DecodePeers
from pdrt.protocol.effects import (
    CloseRoom,
    OpenRoom,
    PrefillEffect,
    SendToDecode,
)
from pdrt.protocol.messages import (
    NOT_RETRYABLE,
    DecodeToPrefill,
    Drained,
    Fingerprint,
    FirstToken,
    FirstTokenData,
    Grant,
    Hello,
    Load,
    Outcome,
    RankProcess,
    Reason,
    Revoke,
    SliceChecksums,
)
from pdrt.protocol.ranks import RankWatch
from pdrt.protocol.room_writer import RankEnd
from pdrt.sampling import TokenLogprobs


class RoomState(Enum):
    OPEN = "open"
    CLOSING = "closing"
    GONE = "gone"


class RoomEvent(Enum):
    FIRST_TOKEN = "first_token"
    WITHDRAWN = "withdrawn"
    RANK_ENDED = "rank_ended"
    ALL_ENDED = "all_ended"


TRANSITIONS: dict[tuple[RoomState, RoomEvent], RoomState] = {
    (RoomState.OPEN, RoomEvent.FIRST_TOKEN): RoomState.OPEN,
    (RoomState.OPEN, RoomEvent.WITHDRAWN): RoomState.CLOSING,
    (RoomState.OPEN, RoomEvent.RANK_ENDED): RoomState.OPEN,
    (RoomState.OPEN, RoomEvent.ALL_ENDED): RoomState.GONE,
    (RoomState.CLOSING, RoomEvent.WITHDRAWN): RoomState.CLOSING,
    (RoomState.CLOSING, RoomEvent.RANK_ENDED): RoomState.CLOSING,
    (RoomState.CLOSING, RoomEvent.ALL_ENDED): RoomState.GONE,
}
"""An event that is not listed raises and changes nothing."""


class PrefillWorkerInfo(msgspec.Struct, frozen=True):
    """What the table must know of its own worker."""

    incarnation: Incarnation
    fingerprint: Fingerprint
    ranks: tuple[RankProcess, ...]
    """Every rank's process, named also where it has nothing to send."""
    engines: tuple[str, ...]
    """Those that it can open, best first."""


class Room:
    """One request's hand-over, as the prefill leader sees it."""

    def __init__(self, grant: Grant, ranks: int, now: float) -> None:
        self.room = grant.room
        self.generation = grant.generation
        self.state = RoomState.OPEN
        self.opened_at = now
        self.deadline = now + grant.seconds_max
        self.first: FirstTokenData | None = None
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.reason: Reason | None = None
        """The first reason for closing; it stays."""
        self.detail = ""
        self.ends: dict[int, RankEnd] = {}
        """By rank: acknowledgements are named, never counted."""
        self.waiting = set(range(ranks))
        """Ranks that have not ended."""


class RoomTable:
    """Every room of one prefill worker. Methods are events; each returns effects, which the
    worker applies in order before the next event."""

    def __init__(self, worker: PrefillWorkerInfo, config: ProtocolConfig, now: float) -> None:
        self.worker = worker
        self.rooms: dict[RoomId, Room] = {}
        self.stale: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""
        self.peers = DecodePeers(worker, config, self.stale, now)
        self.is_leaving = False
        self._config = config
        self._ranks = RankWatch(len(worker.ranks), config, now)

    # Messages

    def receive(
        self, message: DecodeToPrefill, now: float, refusal: str | None = None
    ) -> list[PrefillEffect]:
        """A message of a decode worker. `refusal`: why this worker cannot serve a `Grant` (prompt
        too long, say), in words; the caller judges it before, so that accepting the grant and
        creating the room are one synchronous step."""
        match message:
            case Hello():
                return [*self.peers.hello(message, now), *self._below_floor(message)]
            case Grant():
                return self._grant(message, now, refusal)
            case Revoke():
                return self._revoke(message, now)

    def _accept(self, message: Grant | Revoke, now: float) -> DecodePeer | None:
        """The sender, if the message is for this life and newer than any before it."""
        peer = self.peers.known.get(message.room.decode)
        if message.writer != self.worker.incarnation or peer is None:
            self.stale["other_incarnation"] += 1
            return None
        if message.seq <= peer.last_seq:
            self.stale["old_seq"] += 1
            return None
        self.peers.heard(peer, message.seq, now)
        return peer

    def _grant(self, grant: Grant, now: float, refusal: str | None) -> list[PrefillEffect]:
        peer = self._accept(grant, now)
        if peer is None:
            return []
        if grant.room in self.rooms:
            self.stale["room_again"] += 1
            return []
        refused = self._refuse(peer, grant, refusal)
        if refused is not None:
            reason, detail = refused
            return [self._drained(grant.room, Outcome.ENDED, reason, detail)]
        self.rooms[grant.room] = Room(grant, len(self.worker.ranks), now)
        peer.rooms[grant.room] = grant.generation
        return [OpenRoom(grant)]

    def _refuse(
        self, peer: DecodePeer, grant: Grant, refusal: str | None
    ) -> tuple[Reason, str] | None:
        if refusal is not None:
            return Reason.REJECTED, refusal
        if self.is_leaving:
            return Reason.SHUTDOWN, "this prefill worker is leaving"
        if len(self.rooms) >= self._config.rooms_max:
            return Reason.OVERLOADED, f"{len(self.rooms)} rooms are alive (rooms_max)"
        if not peer.may_write(grant.generation):
            return Reason.BELOW_FLOOR, f"generation {grant.generation} is not open here"
        return None

    def _revoke(self, revoke: Revoke, now: float) -> list[PrefillEffect]:
        peer = self._accept(revoke, now)
        if peer is None:
            return []
        if revoke.room in self.rooms:
            return self.end_room(revoke.room, revoke.reason)
        is_dirty = revoke.generation <= peer.unsettled_generation
        outcome = Outcome.UNSETTLED if is_dirty else Outcome.ENDED
        return [self._drained(revoke.room, outcome, Reason.UNKNOWN_ROOM, "")]

    def _drained(self, room: RoomId, outcome: Outcome, reason: Reason, detail: str) -> SendToDecode:
        retryable = reason not in NOT_RETRYABLE
        drained = Drained(
            room, self.worker.incarnation, outcome, reason, retryable=retryable, detail=detail
        )
        return SendToDecode(room.decode, drained)

    # The worker's own events

    def first_token(self, room: RoomId, first: FirstTokenData) -> list[PrefillEffect]:
        """The last chunk has been computed and its token sampled."""
        record = self.rooms.get(room)
        if record is None or record.state is not RoomState.OPEN:
            return []
        self._enter(record, RoomEvent.FIRST_TOKEN)
        record.first = first
        return [SendToDecode(room.decode, FirstToken(room, self.worker.incarnation, first))]

    def scored(self, room: RoomId, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """What the last chunk's `Drained` will say of the prompt; before the room has ended."""
        if record := self.rooms.get(room):
            record.prompt_logprobs = prompt_logprobs

    def end_room(self, room: RoomId, reason: Reason, detail: str = "") -> list[PrefillEffect]:
        """Close a room on every rank: revoked, or of this worker's own accord. Idempotent."""
        record = self.rooms.get(room)
        if record is None or record.state is RoomState.CLOSING:
            return []
        self._enter(record, RoomEvent.WITHDRAWN)
        record.reason, record.detail = reason, detail
        return [CloseRoom(room, reason, detail)]

    def rank_ended(self, room: RoomId, rank: int, end: RankEnd, now: float) -> list[PrefillEffect]:
        """The last act of one rank's room task."""
        record = self.rooms.get(room)
        if record is None or rank not in record.waiting:
            self.stale["rank_ended_again"] += 1
            return []
        self._enter(record, RoomEvent.RANK_ENDED)
        record.waiting.remove(rank)
        record.ends[rank] = end
        effects: list[PrefillEffect] = []
        if end.outcome is Outcome.UNSETTLED:
            effects += self._taint(record)
        if end.outcome is not Outcome.COMPLETE:
            effects += self.end_room(room, end.reason or Reason.TASK_FAILED, end.detail)
        if not record.waiting:
            effects += self._all_ended(record, now)
        return effects

    def _taint(self, record: Room) -> list[PrefillEffect]:
        """The generation takes no new writes: its other rooms end too, and go on elsewhere."""
        peer = self.peers.known[record.room.decode]
        peer.taint(record.generation)
        detail = "another room of its generation did not settle"
        effects: list[PrefillEffect] = []
        for room, generation in list(peer.rooms.items()):
            if generation == record.generation and room != record.room:
                effects += self.end_room(room, Reason.WRITE_UNSETTLED, detail)
        return effects

    def _all_ended(self, record: Room, now: float) -> list[PrefillEffect]:
        self._enter(record, RoomEvent.ALL_ENDED)
        outcome = self._outcome(record)
        drained = Drained(
            room=record.room,
            writer=self.worker.incarnation,
            outcome=outcome,
            reason=None if outcome is Outcome.COMPLETE else record.reason,
            retryable=record.reason not in NOT_RETRYABLE,
            bytes_written=sum(end.bytes_written for end in record.ends.values()),
            first=record.first,
            detail=record.detail,
            prompt_logprobs=record.prompt_logprobs if outcome is Outcome.COMPLETE else (),
            checksums=self._checksums(record) if outcome is Outcome.COMPLETE else (),
        )
        del self.rooms[record.room]
        is_unsettled = outcome is Outcome.UNSETTLED
        effects = self.peers.room_ended(record.room, is_unsettled, now)
        return [SendToDecode(record.room.decode, drained), *effects]

    @staticmethod
    def _outcome(record: Room) -> Outcome:
        outcomes = {end.outcome for end in record.ends.values()}
        for worst in (Outcome.UNSETTLED, Outcome.ENDED):
            if worst in outcomes:
                return worst
        return Outcome.COMPLETE

    @staticmethod
    def _checksums(record: Room) -> tuple[SliceChecksums, ...]:
        return tuple(x for rank in sorted(record.ends) for x in record.ends[rank].checksums)

    def _enter(self, record: Room, event: RoomEvent) -> None:
        assert (record.state, event) in TRANSITIONS, (record.room, record.state, event)
        record.state = TRANSITIONS[record.state, event]

    # Engines

    def engine_of(self, room: RoomId) -> str:
        """What an alive room is written through."""
        return self.peers.known[room.decode].engines[self.rooms[room].generation].name

    def engine_opened(
        self, decode: Incarnation, generation: int, rank: int, now: float
    ) -> list[PrefillEffect]:
        """One rank's answer to `OpenEngine`."""
        return self.peers.engine_opened(decode, generation, rank, now)

    def engine_refused(
        self, decode: Incarnation, generation: int, why: str, now: float
    ) -> list[PrefillEffect]:
        """A rank cannot reach the segments; `why` goes to the decode worker."""
        return self.peers.engine_refused(decode, generation, why, now)

    def engine_closed(
        self, decode: Incarnation, generation: int, rank: int, now: float
    ) -> list[PrefillEffect]:
        """One rank's answer to `CloseEngine`: the instance can touch nothing any more."""
        return self.peers.engine_closed(decode, generation, rank, now)

    # Time

    def leave(self) -> list[PrefillEffect]:
        """Take nothing new from now on; what runs is finished."""
        self.is_leaving = True
        self.peers.refusal = "this prefill worker is leaving"
        return []

    def handle_timer(self, now: float) -> list[PrefillEffect]:
        """Every `TICK_SECONDS`, after everything inbound has been read."""
        lost, effects = self.peers.handle_timer(now)
        for decode in lost:
            for room in list(self.peers.known[decode].rooms):
                effects += self.end_room(room, Reason.DECODE_LOST)
        for record in list(self.rooms.values()):
            if now >= record.deadline:
                effects += self.end_room(record.room, Reason.DEADLINE)
        return [*effects, *self._ranks.handle_timer(now)]

    def rank_heard(self, rank: int, now: float) -> None:
        """A sign of life of another rank of this worker."""
        self._ranks.heard(rank, now)

    def _below_floor(self, hello: Hello) -> list[PrefillEffect]:
        peer = self.peers.known.get(hello.decode)
        if peer is None:
            return []
        effects: list[PrefillEffect] = []
        for room, generation in list(peer.rooms.items()):
            if generation < peer.floor:
                effects += self.end_room(room, Reason.BELOW_FLOOR)
        return effects

    def set_load(self, load: Load) -> None:
        """What the next `Welcome`s say."""
        self.peers.load = load

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself."""
        self.peers.check()
        listed = {room for peer in self.peers.known.values() for room in peer.rooms}
        assert listed == self.rooms.keys(), listed ^ self.rooms.keys()
        for room, record in self.rooms.items():
            assert record.state in (RoomState.OPEN, RoomState.CLOSING), room
            assert record.waiting, (room, "every rank has ended and the room is still here")
            assert record.waiting.isdisjoint(record.ends), room
            is_closing = record.state is RoomState.CLOSING
            assert is_closing == (record.reason is not None), room
