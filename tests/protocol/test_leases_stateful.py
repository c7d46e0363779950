"""A `LeaseTable` among liars: any event in any order, with the wrong room, writer, generation, seq
or endpoint. The model records what has been proved; a page may be freed on nothing else. In the
end the faults heal, and every lease must be gone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.effects import (
    CloseFence,
    CloseSegment,
    Connect,
    Disconnect,
    EndLease,
    EndWorker,
    FailRoom,
    KillWriter,
    LeaseReady,
    OpenFence,
    OpenSegment,
    SendToPrefill,
    TakeFirstToken,
)
from pdrt.protocol.leases import LeaseState, LeaseTable
from pdrt.protocol.messages import (
    Drained,
    FirstToken,
    Grant,
    Hello,
    Outcome,
    RankProcess,
    Reason,
    Revoke,
    Welcome,
)
from pdrt.protocol.pairing import DecodeWorkerInfo
from pdrt.protocol.writers import FenceKind
from tests.protocol.traces import (
    DECODE,
    ENDPOINT,
    FINGERPRINT,
    FIRST,
    LOCAL,
    OTHER_DECODE,
    OTHER_ENDPOINT,
    RETIRE,
    request,
    segment,
)

RANKS = 2
PAGES = 10
ENDPOINTS = (ENDPOINT, OTHER_ENDPOINT)
WRITERS = {
    ENDPOINT: tuple(Incarnation(0xA0 + life) for life in range(4)),
    OTHER_ENDPOINT: tuple(Incarnation(0xB0 + life) for life in range(4)),
}
ALL_WRITERS = [writer for writers in WRITERS.values() for writer in writers]
CONFIG = ProtocolConfig(retire_seconds_max=1e6)
"""Teardowns may take as long as they like here; that a slow one ends the worker is tested apart."""

endpoints = st.sampled_from(ENDPOINTS)
generations = st.integers(0, 5)
ranks = st.integers(0, RANKS - 1)
other_writers = st.sampled_from([None] * len(ALL_WRITERS) + ALL_WRITERS)
"""None: the right one."""
welcome_changes = st.fixed_dictionaries(
    {},
    optional={
        "generation": generations,
        "decode": st.just(OTHER_DECODE),
        "refusal": st.just("no"),
        "rooms": st.just(()),
    },
)


class Granted:
    """What the model knows of one room."""

    def __init__(self, grant: Grant, endpoint: str, pages: tuple[int, ...]) -> None:
        self.grant = grant
        self.endpoint = endpoint
        self.pages = pages
        self.failed = False
        self.first = False
        self.ended = False
        self.revoked = False
        self.outcome: Outcome | None = None
        """The first one heard from its own writer: final."""


class LeaseMachine(RuleBasedStateMachine):
    fence: FenceKind

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        worker = DecodeWorkerInfo(DECODE, FINGERPRINT, RANKS, {"test": self.fence}, PAGES)
        self.table = LeaseTable(worker, CONFIG, self.now)
        self.free = set(range(PAGES))
        self.rooms: dict[RoomId, Granted] = {}
        self.last_seq = 0
        self.hellos: dict[str, list[Hello]] = {endpoint: [] for endpoint in ENDPOINTS}
        self.connected: set[str] = set()
        self.opening: set[tuple[str, int]] = set()
        """Every generation that was opened, by endpoint."""
        self.closing: dict[tuple[str, int], set[int]] = {}
        """Ranks that have not torn down yet, of every generation that is to be."""
        self.held: set[tuple[str, Incarnation]] = set()
        self.killed: set[tuple[str, Incarnation]] = set()
        self.dead: set[Incarnation] = set()
        self.steps = 0

    # Effects

    def apply(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Connect(endpoint):
                    assert endpoint not in self.connected
                    self.connected.add(endpoint)
                case Disconnect(endpoint):
                    self.connected.remove(endpoint)
                    assert not any(x.endpoint == endpoint for x in self.alive())
                case OpenSegment(endpoint, generation):
                    older = [g for e, g in self.opening if e == endpoint]
                    assert generation > max(older, default=0), "a name is used again"
                    self.opening.add((endpoint, generation))
                case CloseSegment(endpoint, generation):
                    assert (endpoint, generation) in self.opening
                    assert (endpoint, generation) not in self.closing, "torn down twice"
                    self.closing[endpoint, generation] = set(range(RANKS))
                case OpenFence(endpoint, writer):
                    assert (endpoint, writer) not in self.held
                    self.held.add((endpoint, writer))
                case CloseFence(endpoint, writer):
                    self.held.remove((endpoint, writer))
                    self.killed.discard((endpoint, writer))
                    needing = [x for x in self.alive() if x.grant.writer == writer]
                    assert not [x for x in needing if x.endpoint == endpoint]
                case KillWriter(endpoint, writer):
                    assert self.fence is LOCAL
                    assert (endpoint, writer) in self.held - self.killed, "killed twice"
                    self.killed.add((endpoint, writer))
                case SendToPrefill(endpoint, message):
                    self.apply_send(endpoint, message)
                case EndWorker(why):
                    raise AssertionError(why)
                case _:
                    self.apply_room(effect)

    def apply_send(self, endpoint: str, message: Any) -> None:
        assert endpoint in self.connected
        assert message.seq > self.last_seq, "seqs leave in order, each once"
        self.last_seq = message.seq
        match message:
            case Hello():
                self.hellos[endpoint].append(message)
                closing = {g for e, g in self.closing if e == endpoint}
                assert message.generation not in closing
            case Revoke():
                room = self.rooms[message.room]
                assert not room.ended
                assert room.failed
                assert (message.writer, message.generation) == (
                    room.grant.writer,
                    room.grant.generation,
                )
                room.revoked = True

    def apply_room(self, effect: Any) -> None:
        room = self.rooms[effect.room]
        assert not room.ended, f"{effect} after the end"
        match effect:
            case TakeFirstToken():
                assert not room.first, "a token is streamed twice"
                assert not room.failed, "a token of a room that has failed"
                room.first = True
            case FailRoom():
                assert not room.failed, "its request hears of it once"
                room.failed = True
            case LeaseReady():
                assert not room.failed
                assert room.outcome is Outcome.COMPLETE
                assert room.first, "READY without a first token"
                room.ended = True
                self.free |= set(room.pages)
            case EndLease():
                assert room.failed
                assert not room.pages or self.is_proved(room), "freed without proof"
                room.ended = True
                assert self.free.isdisjoint(room.pages)
                self.free |= set(room.pages)

    def is_proved(self, room: Granted) -> bool:
        if room.outcome in (Outcome.COMPLETE, Outcome.ENDED):
            return True
        if self.fence is LOCAL:
            return room.grant.writer in self.dead
        return self.closing.get((room.endpoint, room.grant.generation)) == set()

    def is_bad_step(self) -> bool:
        """Every third step may be hostile; else no lease would live long enough to matter."""
        return self.steps % 3 == 0

    def alive(self) -> list[Granted]:
        return [room for room in self.rooms.values() if not room.ended]

    # Pairing

    @initialize()
    def pair_both(self) -> None:
        for endpoint in ENDPOINTS:
            self.want(endpoint)
            self.open_all(endpoint)
            self.welcome_honestly(endpoint, WRITERS[endpoint][0])

    @rule(endpoint=endpoints)
    def want(self, endpoint: str) -> None:
        self.apply(self.table.want(endpoint, self.now))

    @precondition(lambda self: self.is_bad_step())
    @rule(endpoint=endpoints)
    def unwant(self, endpoint: str) -> None:
        self.table.unwant(endpoint)

    @precondition(lambda self: self.is_bad_step())
    @rule(endpoint=endpoints, generation=generations, rank=ranks)
    def segment_opened(self, endpoint: str, generation: int, rank: int) -> None:
        if endpoint in self.table.pairing.peers:
            self.apply(
                self.table.segment_opened(
                    endpoint, generation, rank, (segment(rank, generation),), self.now
                )
            )

    @rule(endpoint=endpoints)
    def open_all(self, endpoint: str) -> None:
        for generation in sorted(g for e, g in self.opening if e == endpoint):
            for rank in range(RANKS):
                self.segment_opened(endpoint, generation, rank)

    @precondition(lambda self: self.is_bad_step())
    @rule(endpoint=endpoints, generation=generations, rank=ranks)
    def segment_closed(self, endpoint: str, generation: int, rank: int) -> None:
        if endpoint in self.table.pairing.peers:
            if (endpoint, generation) in self.closing:
                self.closing[endpoint, generation].discard(rank)
            self.apply(self.table.segment_closed(endpoint, generation, rank, self.now))

    @rule()
    def close_all(self) -> None:
        for (endpoint, generation), waiting in list(self.closing.items()):
            for rank in list(waiting):
                self.segment_closed(endpoint, generation, rank)

    @precondition(lambda self: self.is_bad_step())
    @rule(
        endpoint=endpoints,
        writer=st.sampled_from(ALL_WRITERS),
        seq_back=st.integers(-1, 4),
        changes=welcome_changes,
    )
    def welcome(
        self, endpoint: str, writer: Incarnation, seq_back: int, changes: dict[str, Any]
    ) -> None:
        if not self.hellos[endpoint]:
            return
        hello = self.hellos[endpoint][max(0, len(self.hellos[endpoint]) - 1 - max(seq_back, 0))]
        fields: dict[str, Any] = {
            "decode": DECODE,
            "seq": hello.seq + (1 if seq_back < 0 else 0),
            "generation": hello.generation,
            "floor": hello.floor,
            "writer": writer,
            "ranks": (RankProcess(1, 2, 3),),
            "fingerprint": FINGERPRINT,
            "engines": ("test",),
            "engine": "test",
            "rooms": tuple(room.serial for room in self.rooms),
        }
        message = Welcome(**(fields | changes))
        self.apply(self.table.receive(endpoint, message, self.now))

    @rule(endpoint=endpoints, index=st.integers(0, 3), pages=st.integers(0, 3))
    def recover_and_grant(self, endpoint: str, index: int, pages: int) -> None:
        """All goes well for once."""
        self.want(endpoint)
        self.open_all(endpoint)
        self.tick(0.5, 2)
        peer = self.table.pairing.peers[endpoint]
        current = peer.writer if peer.writer not in self.dead else None
        self.welcome_honestly(endpoint, current or WRITERS[endpoint][index])
        self.grant(endpoint, pages)

    def welcome_honestly(self, endpoint: str, writer: Incarnation) -> None:
        if writer not in self.dead:
            self.welcome(endpoint, writer, 0, {})
            self.fence_opened(endpoint, writer)

    @precondition(lambda self: self.is_bad_step())
    @rule(endpoint=endpoints, writer=st.sampled_from(ALL_WRITERS))
    def fence_opened(self, endpoint: str, writer: Incarnation) -> None:
        """The adapter is honest: it holds no means to fence what is dead or was not asked for."""
        if (endpoint, writer) in self.held and writer not in self.dead:
            self.apply(self.table.fence_opened(endpoint, writer))

    @precondition(lambda self: self.is_bad_step())
    @rule(endpoint=endpoints, writer=st.sampled_from(ALL_WRITERS))
    def fence_refused(self, endpoint: str, writer: Incarnation) -> None:
        if (endpoint, writer) in self.held and writer in self.dead:
            self.apply(self.table.fence_refused(endpoint, writer, "no such process"))

    @precondition(lambda self: self.is_bad_step())
    @rule(writer=st.sampled_from(ALL_WRITERS))
    def writer_dies(self, writer: Incarnation) -> None:
        self.dead.add(writer)
        for endpoint in ENDPOINTS:
            if (endpoint, writer) in self.held and writer in self.dead:
                self.apply(self.table.writer_dead(endpoint, writer, self.now))

    # Rooms

    @rule(endpoint=endpoints, pages=st.integers(0, 3))
    def grant(self, endpoint: str, pages: int) -> None:
        if endpoint not in self.table.usable_endpoints() or pages > len(self.free):
            return
        if self.table.refuses(self.now) is not None:
            return
        taken = tuple(sorted(self.free)[:pages])
        name = self.table.next_room()
        [effect] = self.table.grant(endpoint, request(taken), self.now)
        assert isinstance(effect, SendToPrefill)
        grant = effect.message
        assert isinstance(grant, Grant)
        assert grant.room == name not in self.rooms
        assert (endpoint, grant.generation) in self.opening
        assert (endpoint, grant.generation) not in self.closing, "granted on what is torn down"
        if self.fence is LOCAL:
            assert (endpoint, grant.writer) in self.held - self.killed
            assert grant.writer not in self.dead, "of others it is not known yet"
        self.free -= set(taken)
        self.rooms[name] = Granted(grant, endpoint, taken)
        self.apply([effect])

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), reason=st.sampled_from(Reason))
    def revoke(self, data: st.DataObject, reason: Reason) -> None:
        room = data.draw(st.sampled_from(self.alive()))
        self.apply(self.table.revoke(room.grant.room, reason, self.now))

    @precondition(lambda self: self.rooms)
    @rule(
        data=st.data(),
        endpoint=endpoints,
        writer=other_writers,
        outcome=st.sampled_from([Outcome.COMPLETE, *Outcome]),
        first=st.sampled_from([FIRST, None]),
    )
    def drained(
        self,
        data: st.DataObject,
        endpoint: str,
        writer: Incarnation | None,
        outcome: Outcome,
        first: Any,
    ) -> None:
        room = data.draw(st.sampled_from(self.alive() * 3 + list(self.rooms.values())))
        self.deliver_drain(room, endpoint, writer or room.grant.writer, outcome, first)

    def deliver_drain(
        self, room: Granted, endpoint: str, writer: Incarnation, outcome: Outcome, first: Any
    ) -> None:
        if writer == room.grant.writer and room.outcome is None:
            room.outcome = outcome
        message = Drained(room.grant.room, writer, outcome, first=first)
        effects = self.table.receive(endpoint, message, self.now)
        if writer != room.grant.writer or room.ended:
            assert effects == []
        self.apply(effects)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), endpoint=endpoints, writer=other_writers)
    def first_token(self, data: st.DataObject, endpoint: str, writer: Incarnation | None) -> None:
        room = data.draw(st.sampled_from(self.alive() * 3 + list(self.rooms.values())))
        message = FirstToken(room.grant.room, writer or room.grant.writer, FIRST)
        self.apply(self.table.receive(endpoint, message, self.now))

    # Time

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.9, 20.0]), times=st.integers(1, 12))
    def tick(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.now += seconds
            # The other ranks are well.
            self.table.rank_heard(1, self.now)
            self.apply(self.table.handle_timer(self.now))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.steps += 1
        self.table.check()
        alive = {room.grant.room: room for room in self.alive()}
        assert self.table.leases.keys() == alive.keys()
        leased = [page for room in alive.values() for page in room.pages]
        assert len(set(leased)) == len(leased)
        assert self.free.isdisjoint(leased)
        for name, room in alive.items():
            lease = self.table.leases[name]
            assert (lease.state is LeaseState.REVOKING) == room.failed
            assert (lease.first is not None) == room.first
        for endpoint in ENDPOINTS:
            open_now = {g for e, g in self.opening if e == endpoint}
            torn = {g for (e, g), waiting in self.closing.items() if e == endpoint and not waiting}
            assert len(open_now - torn) <= 2, "two generations alive at most"

    # Healing

    def heal(self) -> None:
        """Everybody answers, truthfully, from now on."""
        for _ in range(400):
            for endpoint in ENDPOINTS:
                self.open_all(endpoint)
            self.close_all()
            for _, writer in list(self.killed):
                self.writer_dies(writer)
            for endpoint in self.connected:
                living = [w for w in WRITERS[endpoint] if w not in self.dead]
                for writer in living[-1:]:
                    self.welcome_honestly(endpoint, writer)
            for room in self.alive():
                if room.revoked and room.grant.writer not in self.dead:
                    outcome = room.outcome or Outcome.ENDED
                    self.deliver_drain(room, room.endpoint, room.grant.writer, outcome, None)
            self.tick(0.5, 1)
            if not self.alive() and not any(self.closing.values()):
                break
            for room in self.alive():
                if not room.revoked and not room.failed:
                    self.apply(self.table.revoke(room.grant.room, Reason.DEADLINE, self.now))

    def teardown(self) -> None:
        self.heal()
        assert not self.alive(), "a lease never ended"
        assert self.free == set(range(PAGES)), "a page leaked"
        assert self.table.quarantined_pages(self.now) == 0
        for endpoint in ENDPOINTS:
            self.unwant(endpoint)
        for _ in range(3):
            for endpoint in ENDPOINTS:
                self.open_all(endpoint)
            self.tick(0.5, 1)
            self.close_all()
        self.tick(0.5, 1)
        assert self.connected == set(), "an endpoint is not let go"
        assert self.held == set(), "means to fence are kept for nobody"


class RetireMachine(LeaseMachine):
    fence = RETIRE


class LocalMachine(LeaseMachine):
    fence = LOCAL


TestRetire = RetireMachine.TestCase
TestRetire.settings = settings(max_examples=120, stateful_step_count=40)
TestLocal = LocalMachine.TestCase
TestLocal.settings = settings(max_examples=120, stateful_step_count=40)
