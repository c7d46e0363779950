"""A `RoomTable` among liars: any message and any rank's report in any order. The model records
which ranks have drained and which engines are destroyed; a source is released on nothing else.
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
    CloseEngine,
    CloseRoom,
    EndWorker,
    OpenEngine,
    OpenRoom,
    ReleaseSource,
    SendToDecode,
)
from pdrt.protocol.messages import (
    Drained,
    FirstToken,
    Grant,
    Hello,
    Outcome,
    Reason,
    Revoke,
    Welcome,
)
from pdrt.protocol.room_writer import RankEnd
from pdrt.protocol.rooms import RoomState
from pdrt.sampling import Sampling
from tests.protocol.traces import (
    DECODE,
    FINGERPRINT,
    FIRST,
    NEXT_WRITER,
    OTHER_DECODE,
    WRITER,
    Prefill,
    segment,
)

RANKS = 4
DECODES = (DECODE, OTHER_DECODE)
CONFIG = ProtocolConfig(retire_seconds_max=1e6)

decodes = st.sampled_from(DECODES)
generations = st.integers(1, 4)
ranks = st.integers(0, RANKS - 1)
outcomes = st.sampled_from([Outcome.COMPLETE, *Outcome])
seq_steps = st.sampled_from([1, 1, 1, 2, 0, -1, -3])


class Opened:
    """What the model knows of one room."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.ends: dict[int, Outcome] = {}
        """By rank: the first report, which is final."""
        self.closed = False
        self.drained = False
        self.released = False

    @property
    def is_dirty(self) -> bool:
        return Outcome.UNSETTLED in self.ends.values()

    @property
    def engine(self) -> tuple[Incarnation, int]:
        return self.grant.room.decode, self.grant.generation


class RoomMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.prefill = Prefill(RANKS, CONFIG)
        self.rooms: dict[RoomId, Opened] = {}
        self.serial = 0
        self.steps = 0
        self.accepted = dict.fromkeys(DECODES, 0)
        """The highest seq that was delivered to the right writer, by decode incarnation."""
        self.dirty = dict.fromkeys(DECODES, 0)
        self.engines: dict[tuple[Incarnation, int], set[int]] = {}
        """Engine instances: ranks that have not destroyed theirs since it was asked for."""
        self.closing: set[tuple[Incarnation, int]] = set()
        self.answered: set[tuple[Incarnation, int]] = set()

    # Effects

    def apply(self, effects: list[Any]) -> None:
        self.prefill.table.check()
        for effect in effects:
            match effect:
                case SendToDecode(decode, message):
                    self.apply_send(decode, message)
                case OpenEngine(decode, generation):
                    assert (decode, generation) not in self.engines, "opened twice"
                    assert generation > self.dirty[decode], "a tainted generation is used again"
                    self.engines[decode, generation] = set(range(RANKS))
                case CloseEngine(decode, generation):
                    assert (decode, generation) not in self.closing, "closed twice"
                    users = [x for x in self.alive() if x.engine == (decode, generation)]
                    assert not users, "destroyed under a room"
                    self.closing.add((decode, generation))
                    self.engines[decode, generation] = set(range(RANKS))
                case OpenRoom(grant):
                    assert grant.room not in self.rooms
                    assert (grant.room.decode, grant.generation) in self.engines
                    self.rooms[grant.room] = Opened(grant)
                case CloseRoom(room):
                    assert not self.rooms[room].closed, "closed twice"
                    self.rooms[room].closed = True
                case ReleaseSource(room):
                    self.release(self.rooms[room])
                case EndWorker(why):
                    raise AssertionError(why)

    def apply_send(self, decode: Incarnation, message: Any) -> None:
        match message:
            case Welcome():
                assert message.decode == decode
                assert (decode, message.seq) not in self.answered, "answered twice"
                self.answered.add((decode, message.seq))
                if message.generation:
                    assert message.generation > self.dirty[decode]
                    assert (decode, message.generation) not in self.closing
            case FirstToken():
                assert not self.rooms[message.room].closed
            case Drained():
                assert message.room.decode == decode
                room = self.rooms.get(message.room)
                if room is None or room.drained:
                    return
                assert set(room.ends) == set(range(RANKS)), "drained without every rank"
                worst = Outcome.UNSETTLED if room.is_dirty else Outcome.ENDED
                is_complete = set(room.ends.values()) == {Outcome.COMPLETE}
                assert message.outcome is (Outcome.COMPLETE if is_complete else worst)
                room.drained = True

    def release(self, room: Opened) -> None:
        assert not room.released, "released twice"
        assert set(room.ends) == set(range(RANKS)), "released before every rank drained"
        if room.is_dirty:
            assert room.engine in self.closing, "released under a living engine"
            assert not self.engines[room.engine]
        room.released = True

    def is_bad_step(self) -> bool:
        """Every third step may be hostile; else no room would live long enough to matter."""
        return self.steps % 3 == 0

    def alive(self) -> list[Opened]:
        return [room for room in self.rooms.values() if not room.drained]

    # Messages

    def seq(self, decode: Incarnation, step: int) -> int:
        """Relative to the last one accepted; the table must agree on which are newer."""
        return max(0, self.accepted[decode] + step)

    @initialize()
    def pair_both(self) -> None:
        for decode in DECODES:
            self.hello(decode, 1, 1, 1)
            self.open_engines()

    @rule(decode=decodes)
    def recover_and_grant(self, decode: Incarnation) -> None:
        """All goes well for once."""
        floor = self.prefill.table.peers.known[decode].floor
        generation = max(self.dirty[decode] + 1, floor)
        for _ in range(2):
            self.hello(decode, 1, generation, 1)
            self.open_engines()
            self.close_engines()
        self.grant(decode, 1, generation, 1)

    @precondition(lambda self: self.is_bad_step())
    @rule(decode=decodes, step=seq_steps, generation=generations, floor=generations)
    def hello(self, decode: Incarnation, step: int, generation: int, floor: int) -> None:
        seq = self.seq(decode, step)
        message = Hello(
            decode=decode,
            seq=seq,
            fingerprint=FINGERPRINT,
            generation=generation,
            segments=(segment(0, generation),),
            floor=min(floor, generation),
        )
        effects = self.prefill.table.receive(message, self.prefill.now)
        assert seq > self.accepted[decode] or effects == []
        self.accepted[decode] = max(self.accepted[decode], seq)
        self.apply(effects)

    @precondition(lambda self: self.is_bad_step())
    @rule(decode=decodes, step=seq_steps, generation=generations, right=st.sampled_from([1, 1, 0]))
    def grant(self, decode: Incarnation, step: int, generation: int, right: int) -> None:
        self.serial += 1
        seq = self.seq(decode, step)
        message = Grant(
            room=RoomId(decode, self.serial),
            writer=WRITER if right else NEXT_WRITER,
            seq=seq,
            generation=generation,
            pages=(1,),
            first_page=0,
            token_ids=(1, 2),
            output_tokens=0,
            sampling=Sampling(max_tokens=4),
            seconds_max=10.0,
        )
        effects = self.prefill.table.receive(message, self.prefill.now)
        if not right or seq <= self.accepted[decode]:
            assert effects == []
        if right:
            self.accepted[decode] = max(self.accepted[decode], seq)
        self.apply(effects)

    @rule(decode=decodes, data=st.data(), step=seq_steps, generation=generations)
    def revoke(self, decode: Incarnation, data: st.DataObject, step: int, generation: int) -> None:
        """Also of rooms whose grant is still on its way, or never comes."""
        serial = data.draw(st.integers(1, self.serial + 3))
        room = self.rooms.get(RoomId(decode, serial))
        number = generation if room is None else room.grant.generation
        seq = self.seq(decode, step)
        message = Revoke(RoomId(decode, serial), WRITER, seq, number, Reason.CLIENT_GONE)
        effects = self.prefill.table.receive(message, self.prefill.now)
        if seq <= self.accepted[decode]:
            assert effects == []
        else:
            self.accepted[decode] = seq
            if room is None or room.drained:
                [answer] = effects
                is_clean = answer.message.outcome is Outcome.ENDED
                assert is_clean == (number > self.dirty[decode])
        self.apply(effects)

    # Ranks

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), rank=ranks, outcome=outcomes)
    def rank_ended(self, data: st.DataObject, rank: int, outcome: Outcome) -> None:
        room = data.draw(st.sampled_from(self.alive() * 3 + list(self.rooms.values())))
        self.end_rank(room, rank, outcome)

    def end_rank(self, room: Opened, rank: int, outcome: Outcome) -> None:
        is_new = not room.drained and rank not in room.ends
        if is_new:
            room.ends[rank] = outcome
            if outcome is Outcome.UNSETTLED:
                decode, generation = room.engine
                self.dirty[decode] = max(self.dirty[decode], generation)
        reason = None if outcome is Outcome.COMPLETE else Reason.WRITE_FAILED
        end = RankEnd(outcome, reason, 1)
        now = self.prefill.now
        effects = self.prefill.table.rank_ended(room.grant.room, rank, end, now)
        assert is_new or effects == []
        self.apply(effects)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), outcome=outcomes)
    def all_ranks_end(self, data: st.DataObject, outcome: Outcome) -> None:
        room = data.draw(st.sampled_from(self.alive()))
        for rank in data.draw(st.permutations(range(RANKS))):
            self.end_rank(room, rank, outcome)

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from(list(self.rooms.values())))
        self.apply(self.prefill.table.first_token(room.grant.room, FIRST))

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), reason=st.sampled_from(Reason))
    def end_of_own_accord(self, data: st.DataObject, reason: Reason) -> None:
        room = data.draw(st.sampled_from(list(self.rooms.values())))
        self.apply(self.prefill.table.end_room(room.grant.room, reason))

    # Engines

    @rule()
    def open_engines(self) -> None:
        for decode, generation in list(self.engines):
            for rank in range(RANKS):
                if (decode, generation) not in self.closing:
                    self.apply(
                        self.prefill.table.engine_opened(decode, generation, rank, self.prefill.now)
                    )

    @precondition(lambda self: self.is_bad_step())
    @rule(decode=decodes, generation=generations, rank=ranks)
    def engine_opened(self, decode: Incarnation, generation: int, rank: int) -> None:
        self.apply(self.prefill.table.engine_opened(decode, generation, rank, self.prefill.now))

    @precondition(lambda self: self.is_bad_step())
    @rule(decode=decodes, generation=generations)
    def engine_refused(self, decode: Incarnation, generation: int) -> None:
        now = self.prefill.now
        self.apply(self.prefill.table.engine_refused(decode, generation, "no", now))

    @rule(decode=decodes, generation=generations, rank=ranks)
    def engine_closed(self, decode: Incarnation, generation: int, rank: int) -> None:
        """Ranks are honest: they confirm what they were asked for."""
        if (decode, generation) not in self.closing:
            return
        waiting = self.engines[decode, generation]
        waiting.discard(rank)
        effects = self.prefill.table.engine_closed(decode, generation, rank, self.prefill.now)
        if waiting:
            assert effects == []
            return
        released = [x for x in effects if isinstance(x, ReleaseSource)]
        self.apply(released)
        del self.engines[decode, generation]
        self.closing.discard((decode, generation))
        self.apply(effects[len(released) :])

    @rule()
    def close_engines(self) -> None:
        for decode, generation in list(self.closing):
            for rank in range(RANKS):
                self.engine_closed(decode, generation, rank)

    # Time

    @precondition(lambda self: self.is_bad_step())
    @rule(seconds=st.sampled_from([0.1, 0.5, 0.9, 20.0]), times=st.integers(1, 12))
    def tick(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.prefill.now += seconds
            for rank in range(1, RANKS):
                self.prefill.table.rank_heard(rank, self.prefill.now)
            self.apply(self.prefill.table.handle_timer(self.prefill.now))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.steps += 1
        table = self.prefill.table
        table.check()
        assert table.rooms.keys() == {room.grant.room for room in self.alive()}
        for room in self.alive():
            record = table.rooms[room.grant.room]
            assert record.waiting == set(range(RANKS)) - room.ends.keys()
            assert (record.state is RoomState.CLOSING) == room.closed
            assert not room.released
        retained = {name for name, room in self.rooms.items() if room.drained and not room.released}
        assert table.peers.retained_rooms() == retained
        for name in retained:
            assert self.rooms[name].is_dirty, "a clean room's source stays"

    def teardown(self) -> None:
        """Everybody withdraws; every rank drains; every engine is destroyed."""
        for room in self.alive():
            self.apply(self.prefill.table.end_room(room.grant.room, Reason.SHUTDOWN))
            for rank in range(RANKS):
                self.end_rank(room, rank, Outcome.ENDED)
        self.close_engines()
        assert not self.prefill.table.rooms
        assert all(room.released for room in self.rooms.values()), "a source is never released"


TestRooms = RoomMachine.TestCase
TestRooms.settings = settings(max_examples=120, stateful_step_count=40)
