"""Builders for traces: an event in, effects out, every invariant checked after each event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.protocol.effects import (
    CloseSegment,
    DecodeEffect,
    EndLease,
    EndWorker,
    OpenSegment,
    PrefillEffect,
    ReleaseSource,
    SendToDecode,
    SendToPrefill,
)
from pdrt.protocol.leases import GrantRequest, LeaseTable
from pdrt.protocol.messages import (
    Drained,
    Fingerprint,
    FirstToken,
    FirstTokenData,
    Grant,
    Hello,
    Outcome,
    RankProcess,
    Reason,
    Revoke,
    Segment,
    Welcome,
)
from pdrt.protocol.pairing import DecodeWorkerInfo
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import PrefillWorkerInfo, RoomTable
from pdrt.protocol.writers import FenceKind
from pdrt.sampling import Sampling

DECODE = Incarnation(0xD0)
OTHER_DECODE = Incarnation(0xD1)
WRITER = Incarnation(0xA0)
NEXT_WRITER = Incarnation(0xA1)
ENDPOINT = "tcp://127.0.0.1:7001"
OTHER_ENDPOINT = "tcp://127.0.0.1:7002"
LAYOUT = KvLayout(page_size=16, kv_heads=4, layers=2, head_dim=8, dtype="bfloat16")
FINGERPRINT = Fingerprint(model="m", digest="d", layout=LAYOUT)
FIRST = FirstTokenData(token=7, prompt_tokens=40)
CONFIG = ProtocolConfig()
RETIRE = FenceKind.RETIRE_GENERATION
LOCAL = FenceKind.PROCESS_DEATH

Effect = TypeVar("Effect")


def only(effects: Sequence[object], kind: type[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: Sequence[object]) -> list[Any]:
    """The messages among effects, of either side."""
    return [x.message for x in effects if isinstance(x, SendToPrefill | SendToDecode)]


def one(items: Sequence[Effect]) -> Effect:
    assert len(items) == 1, items
    return items[0]


def request(
    pages: Sequence[int], *, output_tokens: int = 0, max_tokens: int = 8, written: int | None = None
) -> GrantRequest:
    return GrantRequest(
        pages=tuple(pages),
        written_pages=len(pages) if written is None else written,
        first_page=0,
        token_ids=tuple(range(40 + output_tokens)),
        output_tokens=output_tokens,
        sampling=Sampling(max_tokens=max_tokens),
        seconds_max=60.0,
    )


def segment(rank: int, generation: int) -> Segment:
    return Segment(rank, "test", f"{rank}.{generation}".encode())


class Decode:
    """A `LeaseTable`, its clock, and a ledger of which pages were freed for which room."""

    def __init__(
        self,
        fence: FenceKind = RETIRE,
        ranks: int = 1,
        config: ProtocolConfig = CONFIG,
        quarantine_pages_max: int = 100,
        engines: Mapping[str, FenceKind] | None = None,
    ) -> None:
        """`engines`: one named `test` by default, fenced by `fence`."""
        engines = {"test": fence} if engines is None else engines
        self.now = 1000.0
        self.ranks = ranks
        self.table = LeaseTable(
            DecodeWorkerInfo(DECODE, FINGERPRINT, ranks, engines, quarantine_pages_max),
            config,
            self.now,
        )
        self.freed: list[RoomId] = []
        self.sent: list[SendToPrefill] = []
        self.closing: list[CloseSegment] = []

    @property
    def pairing(self) -> Any:
        return self.table.pairing

    def note(self, effects: list[DecodeEffect]) -> list[DecodeEffect]:
        """Check everything that holds after any event."""
        self.table.check()
        for effect in effects:
            match effect:
                case EndLease(room):
                    assert room not in self.freed, "freed twice"
                    assert room not in self.table.leases
                    self.freed.append(room)
                case SendToPrefill(_, message):
                    assert not self.sent or message.seq > self.sent[-1].message.seq, "stale seq"
                    self.sent.append(effect)
                case CloseSegment():
                    assert effect not in self.closing, "torn down twice"
                    self.closing.append(effect)
        return effects

    # Pairing

    def want(self, endpoint: str = ENDPOINT) -> list[DecodeEffect]:
        return self.note(self.table.want(endpoint, self.now))

    def open_segments(self, generation: int = 1, endpoint: str = ENDPOINT) -> list[DecodeEffect]:
        ranks = range(self.ranks)
        return [x for rank in ranks for x in self.open_segment(rank, generation, endpoint)]

    def open_segment(
        self, rank: int, generation: int = 1, endpoint: str = ENDPOINT
    ) -> list[DecodeEffect]:
        shown = (segment(rank, generation),)
        return self.note(self.table.segment_opened(endpoint, generation, rank, shown, self.now))

    def close_segment(
        self, rank: int, generation: int = 1, endpoint: str = ENDPOINT
    ) -> list[DecodeEffect]:
        return self.note(self.table.segment_closed(endpoint, generation, rank, self.now))

    def close_segments(self, generation: int = 1, endpoint: str = ENDPOINT) -> list[DecodeEffect]:
        return [
            effect
            for rank in range(self.ranks)
            for effect in self.close_segment(rank, generation, endpoint)
        ]

    def last_hello(self, endpoint: str = ENDPOINT) -> Hello:
        hellos = [x.message for x in self.sent if x.endpoint == endpoint]
        return [x for x in hellos if isinstance(x, Hello)][-1]

    def answer(
        self,
        writer: Incarnation = WRITER,
        endpoint: str = ENDPOINT,
        hello: Hello | None = None,
        rooms: Sequence[RoomId] | None = None,
        **changes: Any,
    ) -> Welcome:
        """A `Welcome` for the last `Hello`, listing every lease's room."""
        hello = hello or self.last_hello(endpoint)
        alive = self.table.leases if rooms is None else rooms
        fields: dict[str, Any] = {
            "decode": DECODE,
            "seq": hello.seq,
            "generation": hello.generation,
            "floor": hello.floor,
            "writer": writer,
            "ranks": (RankProcess(11, 22, 33),),
            "fingerprint": FINGERPRINT,
            "engines": ("test",),
            "engine": "test",
            "rooms": tuple(room.serial for room in alive),
        }
        return Welcome(**(fields | changes))

    def welcome(
        self,
        writer: Incarnation = WRITER,
        endpoint: str = ENDPOINT,
        **changes: Any,
    ) -> list[DecodeEffect]:
        return self.receive(self.answer(writer, endpoint, **changes), endpoint)

    def fence_opened(
        self, writer: Incarnation = WRITER, endpoint: str = ENDPOINT
    ) -> list[DecodeEffect]:
        return self.note(self.table.fence_opened(endpoint, writer))

    def pair(self, writer: Incarnation = WRITER, endpoint: str = ENDPOINT) -> None:
        """Everything up to an endpoint that grants may go to."""
        opened = only(self.want(endpoint), OpenSegment)
        for effect in opened:
            self.open_segments(effect.generation, endpoint)
        self.welcome(writer, endpoint)
        self.fence_opened(writer, endpoint)
        assert endpoint in self.table.usable_endpoints()

    # Rooms

    def grant(self, pages: Sequence[int] = (), endpoint: str = ENDPOINT, **changes: Any) -> RoomId:
        effects = self.note(self.table.grant(endpoint, request(pages, **changes), self.now))
        return one([x for x in sent(effects) if isinstance(x, Grant)]).room

    def revoke(self, room: RoomId, reason: Reason = Reason.CLIENT_GONE) -> list[DecodeEffect]:
        return self.note(self.table.revoke(room, reason, self.now))

    def receive(self, message: Any, endpoint: str = ENDPOINT) -> list[DecodeEffect]:
        return self.note(self.table.receive(endpoint, message, self.now))

    def first(self, room: RoomId, writer: Incarnation = WRITER) -> list[DecodeEffect]:
        return self.receive(FirstToken(room, writer, FIRST))

    def drained(
        self,
        room: RoomId,
        outcome: Outcome,
        writer: Incarnation = WRITER,
        endpoint: str = ENDPOINT,
        **changes: Any,
    ) -> list[DecodeEffect]:
        return self.receive(Drained(room, writer, outcome, **changes), endpoint)

    # Time

    def tick(self, seconds: float = 0.1) -> list[DecodeEffect]:
        self.now += seconds
        return self.note(self.table.handle_timer(self.now))

    def wait(self, seconds: float, *, answering: bool = True) -> list[DecodeEffect]:
        """Ticks of half a second; every `Hello` is answered by whoever answered last."""
        effects: list[DecodeEffect] = []
        until = self.now + seconds
        while self.now < until:
            step = self.tick(min(0.5, until - self.now))
            if answering:
                for effect in only(step, SendToPrefill):
                    writer = self.pairing.peers[effect.endpoint].writer
                    if isinstance(effect.message, Hello) and writer is not None:
                        step += self.welcome(writer, effect.endpoint)
            effects += step
        return effects


class Prefill:
    """A `RoomTable`, its clock and a decode worker's counter."""

    def __init__(
        self,
        ranks: int = 1,
        config: ProtocolConfig = CONFIG,
        engines: tuple[str, ...] = ("test",),
    ) -> None:
        self.now = 1000.0
        self.ranks = ranks
        processes = tuple(RankProcess(10 + rank, 20, 30) for rank in range(ranks))
        self.table = RoomTable(
            PrefillWorkerInfo(WRITER, FINGERPRINT, processes, engines), config, self.now
        )
        self.seq = 0
        self.serial = 0
        self.released: list[RoomId] = []
        self.drained: list[Drained] = []

    def note(self, effects: list[PrefillEffect]) -> list[PrefillEffect]:
        self.table.check()
        for effect in effects:
            match effect:
                case ReleaseSource(room):
                    assert room not in self.released, "released twice"
                    assert room not in self.table.rooms
                    self.released.append(room)
                case SendToDecode(_, Drained() as drained):
                    self.drained.append(drained)
        return effects

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def receive(self, message: Any, refusal: str | None = None) -> list[PrefillEffect]:
        return self.note(self.table.receive(message, self.now, refusal))

    def hello(
        self,
        generation: int = 1,
        decode: Incarnation = DECODE,
        floor: int = 1,
        seq: int | None = None,
        **changes: Any,
    ) -> list[PrefillEffect]:
        fields: dict[str, Any] = {
            "decode": decode,
            "seq": self.next_seq() if seq is None else seq,
            "fingerprint": FINGERPRINT,
            "generation": generation,
            "segments": (segment(0, generation),),
            "floor": floor,
        }
        return self.receive(Hello(**(fields | changes)))

    def engine_opened(
        self, generation: int = 1, decode: Incarnation = DECODE
    ) -> list[PrefillEffect]:
        return [
            effect
            for rank in range(self.ranks)
            for effect in self.note(self.table.engine_opened(decode, generation, rank, self.now))
        ]

    def engine_closed(
        self, rank: int = 0, generation: int = 1, decode: Incarnation = DECODE
    ) -> list[PrefillEffect]:
        return self.note(self.table.engine_closed(decode, generation, rank, self.now))

    def pair(self, generation: int = 1, decode: Incarnation = DECODE) -> None:
        self.hello(generation, decode, floor=generation)
        self.engine_opened(generation, decode)

    def make_grant(
        self, generation: int = 1, decode: Incarnation = DECODE, **changes: Any
    ) -> Grant:
        self.serial += 1
        fields: dict[str, Any] = {
            "room": RoomId(decode, self.serial),
            "writer": WRITER,
            "seq": self.next_seq(),
            "generation": generation,
            "pages": (1, 2, 3),
            "first_page": 0,
            "token_ids": tuple(range(40)),
            "output_tokens": 0,
            "sampling": Sampling(max_tokens=8),
            "seconds_max": 60.0,
        }
        return Grant(**(fields | changes))

    def grant(self, generation: int = 1, decode: Incarnation = DECODE, **changes: Any) -> RoomId:
        grant = self.make_grant(generation, decode, **changes)
        self.receive(grant)
        assert grant.room in self.table.rooms
        return grant.room

    def revoke(
        self,
        room: RoomId,
        generation: int = 1,
        reason: Reason = Reason.CLIENT_GONE,
        seq: int | None = None,
        writer: Incarnation = WRITER,
    ) -> list[PrefillEffect]:
        seq = self.next_seq() if seq is None else seq
        return self.receive(Revoke(room, writer, seq, generation, reason))

    def rank_ended(
        self, room: RoomId, outcome: Outcome, rank: int = 0, reason: Reason | None = None
    ) -> list[PrefillEffect]:
        if reason is None and outcome is not Outcome.COMPLETE:
            reason = Reason.WRITE_FAILED if outcome is Outcome.ENDED else Reason.WRITE_UNSETTLED
        end = RankEnd(outcome, reason, 100)
        return self.note(self.table.rank_ended(room, rank, end, self.now))

    def tick(self, seconds: float = 0.1) -> list[PrefillEffect]:
        self.now += seconds
        return self.note(self.table.handle_timer(self.now))


def ends_worker(effects: Sequence[object]) -> str:
    return one(only(effects, EndWorker)).why
