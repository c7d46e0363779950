"""Both halves of the hand-over, without anything in between: each message arrives at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from pdrt.config import ProtocolConfig
from pdrt.ids import RoomId
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.protocol.effects import (
    CloseRoom,
    DecodeEffect,
    EndLease,
    LeaseReady,
    OpenEngine,
    OpenFence,
    OpenSegment,
    PrefillEffect,
    ReleaseSource,
    SendToDecode,
    SendToPrefill,
)
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.messages import FirstToken, Outcome, RankProcess, Reason
from pdrt.protocol.pairing import DecodeWorkerInfo
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from pdrt.protocol.writers import FenceKind
from tests.protocol.traces import (
    CONFIG,
    DECODE,
    ENDPOINT,
    FINGERPRINT,
    FIRST,
    WRITER,
    request,
    segment,
)

LIFE_SECONDS = 0.001
LIVES_PER_TICK = round(TICK_SECONDS / LIFE_SECONDS)
COMPLETE = RankEnd(Outcome.COMPLETE, None, 100)


class Handover:
    """A lease table and a room table, paired."""

    def __init__(self, config: ProtocolConfig = CONFIG) -> None:
        self.now = 1000.0
        self.leases = LeaseTable(
            DecodeWorkerInfo(DECODE, FINGERPRINT, 1, {"test": FenceKind.PROCESS_DEATH}, 100),
            config,
            self.now,
        )
        self.rooms = RoomTable(
            PrefillWorkerInfo(WRITER, FINGERPRINT, (RankProcess(11, 22, 33),), ("test",)),
            config,
            self.now,
        )
        self.ends: Counter[type] = Counter()
        """`LeaseReady`, `EndLease` and `ReleaseSource` by kind."""
        self._loses_first = False
        self.run(self.leases.want(ENDPOINT, self.now))
        assert self.leases.usable_endpoints() == [ENDPOINT]

    def run(self, effects: Sequence[DecodeEffect | PrefillEffect]) -> None:
        pending = deque(effects)
        while pending:
            pending.extend(self._carry_out(pending.popleft()))

    def _carry_out(
        self, effect: DecodeEffect | PrefillEffect
    ) -> Sequence[DecodeEffect | PrefillEffect]:
        now = self.now
        match effect:
            case SendToPrefill(_, message):
                return self.rooms.receive(message, now)
            case SendToDecode(_, FirstToken()) if self._loses_first:
                return []
            case SendToDecode(_, message):
                return self.leases.receive(ENDPOINT, message, now)
            case OpenSegment(endpoint, generation):
                shown = (segment(0, generation),)
                return self.leases.segment_opened(endpoint, generation, 0, shown, now)
            case OpenFence(endpoint, writer):
                return self.leases.fence_opened(endpoint, writer)
            case OpenEngine(decode, generation):
                return self.rooms.engine_opened(decode, generation, 0, now)
            case CloseRoom(room, reason):
                return self.rooms.rank_ended(room, 0, RankEnd(Outcome.ENDED, reason, 0), now)
            case LeaseReady() | EndLease() | ReleaseSource():
                self.ends[type(effect)] += 1
        return []

    # Lives of rooms

    def live(self, number: int) -> None:
        """One room, from its grant to the end of its lease, in one of several ways."""
        self.now += LIFE_SECONDS
        if number % LIVES_PER_TICK == 0:
            self.run(self.leases.handle_timer(self.now))
            self.run(self.rooms.handle_timer(self.now))
        room = self.leases.next_room()
        self.run(self.leases.grant(ENDPOINT, request((1, 2, 3)), self.now))
        match number % 4:
            case 0:
                self._complete(room)
            case 1:
                self._loses_first = True
                self._complete(room)
                self._loses_first = False
            case 2:
                self.run(self.leases.revoke(room, Reason.CLIENT_GONE, self.now))
            case 3:
                self.run(self.rooms.first_token(room, FIRST))
                self.run(self.rooms.end_room(room, Reason.FORWARD_FAILED))

    def _complete(self, room: RoomId) -> None:
        self.run(self.rooms.first_token(room, FIRST))
        self.run(self.rooms.rank_ended(room, 0, COMPLETE, self.now))
