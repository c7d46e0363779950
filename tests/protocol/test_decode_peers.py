"""What a prefill worker knows of decode workers: generations, floors and engine instances."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.decode_peers import ENGINES_MAX, EngineState
from pdrt.protocol.effects import CloseEngine, CloseRoom, OpenEngine
from pdrt.protocol.messages import Outcome, Reason
from tests.protocol.traces import (
    CONFIG,
    DECODE,
    FINGERPRINT,
    LAYOUT,
    OTHER_DECODE,
    WRITER,
    Prefill,
    ends_worker,
    one,
    only,
    segment,
    sent,
)


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.table.check()


def engines(prefill: Prefill, decode: Incarnation = DECODE) -> dict[int, EngineState]:
    return {n: x.state for n, x in prefill.table.peers.known[decode].engines.items()}


# Handshake


def test_hello_is_answered_once_every_rank_reaches_its_segments() -> None:
    prefill = Prefill(ranks=2)
    assert prefill.hello() == [OpenEngine(DECODE, 1, (segment(0, 1),))]
    assert prefill.table.engine_opened(DECODE, 1, 1, prefill.now) == []
    assert prefill.table.engine_opened(DECODE, 1, 1, prefill.now) == [], "the same rank again"
    [welcome] = sent(prefill.note(prefill.table.engine_opened(DECODE, 1, 0, prefill.now)))
    assert (welcome.decode, welcome.writer, welcome.seq) == (DECODE, WRITER, 1)
    assert (welcome.generation, welcome.floor, welcome.refusal) == (1, 1, None)
    assert len(welcome.ranks) == 2, "every rank is named"


def test_every_hello_is_answered_under_its_own_seq(prefill: Prefill) -> None:
    prefill.pair()
    for _ in range(3):
        welcome = one(sent(prefill.hello()))
        assert (welcome.seq, welcome.generation) == (prefill.seq, 1)


def test_old_and_equal_hellos_are_dropped(prefill: Prefill) -> None:
    prefill.pair()
    prefill.hello()
    assert prefill.hello(seq=prefill.seq) == []
    assert prefill.hello(seq=prefill.seq - 1, generation=2, floor=2) == []
    assert prefill.table.stale["old_seq"] == 2
    assert prefill.table.peers.known[DECODE].floor == 1


def test_slow_engine_does_not_look_like_silence(prefill: Prefill) -> None:
    prefill.hello()
    for seq in range(1, 4):
        welcome = one(sent(prefill.hello()))
        assert (welcome.seq, welcome.generation, welcome.refusal) == (seq, 0, None)
    welcome = one(sent(prefill.engine_opened()))
    assert (welcome.seq, welcome.generation) == (4, 1)


def test_welcome_lists_the_rooms_of_its_own_decode_worker(prefill: Prefill) -> None:
    prefill.pair()
    prefill.pair(decode=OTHER_DECODE)
    mine, _, ending = prefill.grant(), prefill.grant(decode=OTHER_DECODE), prefill.grant()
    prefill.revoke(ending)
    assert one(sent(prefill.hello())).rooms == (mine.serial, ending.serial)
    prefill.rank_ended(ending, Outcome.ENDED)
    assert one(sent(prefill.hello())).rooms == (mine.serial,)


def test_a_generation_waits_while_too_many_engines_are_held(prefill: Prefill) -> None:
    rooms = []
    for generation in range(1, ENGINES_MAX + 1):
        prefill.pair(generation=generation)
        rooms.append(prefill.grant(generation=generation))
    last = ENGINES_MAX + 1
    for _ in range(2):
        effects = prefill.hello(generation=last, floor=last)
        assert not only(effects, OpenEngine)
    assert one(sent(effects)).generation == 0, "it is said that we are alive"
    assert len(engines(prefill)) == ENGINES_MAX
    assert only(prefill.rank_ended(rooms[0], Outcome.ENDED), CloseEngine)
    effects = prefill.engine_closed(generation=1)
    assert one(only(effects, OpenEngine)).generation == last


# Refusals


def test_refusal_names_both_sides_values_and_leaves_no_trace(prefill: Prefill) -> None:
    layout = msgspec.structs.replace(LAYOUT, page_size=32)
    fingerprint = msgspec.structs.replace(FINGERPRINT, layout=layout, digest="e")
    welcome = one(sent(prefill.hello(fingerprint=fingerprint, seq=9)))
    assert welcome.refusal == (
        "prefill and decode differ: model digest: d != e; page_size: 16 != 32"
    )
    assert (welcome.generation, welcome.seq) == (0, 9)
    assert prefill.table.peers.known == {}
    assert prefill.hello(seq=3) != [], "the refused seq was not remembered"


def test_full_table_refuses_in_words_and_keeps_those_it_knows() -> None:
    prefill = Prefill(config=ProtocolConfig(decode_incarnations_max=2))
    prefill.pair()
    assert not prefill.table.peers.is_full
    prefill.pair(decode=OTHER_DECODE)
    assert prefill.table.peers.is_full
    third = Incarnation(0xD2)
    welcome = one(sent(prefill.hello(decode=third)))
    assert "decode_incarnations_max" in welcome.refusal
    assert third not in prefill.table.peers.known
    assert one(sent(prefill.hello())).refusal is None, "a known one goes on"
    prefill.grant()


def test_lost_incarnation_keeps_its_place_and_its_seq() -> None:
    prefill = Prefill(config=ProtocolConfig(decode_incarnations_max=1))
    prefill.pair()
    late = prefill.make_grant()
    prefill.revoke(late.room)
    for _ in range(12):
        prefill.tick(0.5)
    assert prefill.table.peers.known[DECODE].is_lost
    assert prefill.table.peers.is_full
    assert prefill.receive(late) == []
    assert prefill.table.stale["old_seq"] == 1


def test_leaving_worker_refuses_newcomers(prefill: Prefill) -> None:
    prefill.table.leave()
    assert one(sent(prefill.hello())).refusal == "this prefill worker is leaving"
    assert prefill.table.peers.known == {}


def test_segments_that_cannot_be_reached_are_refused_and_tried_again(prefill: Prefill) -> None:
    prefill.hello()
    effects = prefill.note(prefill.table.engine_refused(DECODE, 1, "no route", prefill.now))
    welcome = one(sent(effects))
    assert (welcome.generation, welcome.refusal) == (0, "test: no route")
    assert one(only(effects, CloseEngine)).generation == 1
    assert only(prefill.hello(), OpenEngine) == [], "not before the old instance is destroyed"
    assert one(only(prefill.engine_closed(), OpenEngine)).generation == 1
    assert one(sent(prefill.engine_opened())).refusal is None


# Generations


def test_next_generation_opens_beside_the_old_one_until_the_floor_rises(prefill: Prefill) -> None:
    prefill.pair()
    room = prefill.grant()
    assert prefill.hello(generation=2) == [OpenEngine(DECODE, 2, (segment(0, 2),))]
    assert one(sent(prefill.engine_opened(2))).generation == 2
    assert engines(prefill) == {1: EngineState.OPEN, 2: EngineState.OPEN}
    newer = prefill.grant(generation=2)
    effects = prefill.hello(generation=2, floor=2)
    assert only(effects, CloseRoom) == [CloseRoom(room, Reason.BELOW_FLOOR, "")]
    assert only(effects, CloseEngine) == [], "not while a room writes through it"
    assert newer in prefill.table.rooms
    effects = prefill.rank_ended(room, Outcome.ENDED)
    assert only(effects, CloseEngine) == [CloseEngine(DECODE, 1)]
    prefill.engine_closed()
    assert engines(prefill) == {2: EngineState.OPEN}


def test_worker_that_is_dialled_under_two_names_refuses_the_second(prefill: Prefill) -> None:
    """Each name counts its own generations: a fence of one would miss what the other wrote."""
    prefill.pair()
    room = prefill.grant()
    first = prefill.table.peers.known[DECODE].hello
    assert first is not None
    second = msgspec.structs.replace(
        first, seq=prefill.next_seq(), segments=(segment(0, 7),), floor=1
    )
    welcome = one(sent(prefill.receive(second)))
    assert (welcome.generation, welcome.seq) == (0, second.seq)
    assert "another address" in welcome.refusal
    assert prefill.table.stale["other_pairing"] == 1
    assert room in prefill.table.rooms
    assert one(sent(prefill.hello())).refusal is None, "the first goes on"


def test_hello_below_the_floor_is_of_another_pairing(prefill: Prefill) -> None:
    prefill.pair(generation=3)
    welcome = one(sent(prefill.hello(generation=2)))
    assert "another address" in welcome.refusal
    assert engines(prefill) == {3: EngineState.OPEN}


def test_floor_never_sinks(prefill: Prefill) -> None:
    prefill.pair(generation=3)
    prefill.hello(generation=3, floor=1)
    assert prefill.table.peers.known[DECODE].floor == 3


def test_tainted_engine_is_destroyed_once_its_rooms_have_ended(prefill: Prefill) -> None:
    prefill.pair()
    dirty, other = prefill.grant(), prefill.grant()
    assert only(prefill.rank_ended(dirty, Outcome.UNSETTLED), CloseEngine) == []
    assert only(prefill.rank_ended(other, Outcome.ENDED), CloseEngine) == [CloseEngine(DECODE, 1)]
    welcome = one(sent(prefill.hello()))
    assert (welcome.generation, welcome.refusal) == (0, None), "alive, but not on this generation"
    prefill.engine_closed()
    assert only(prefill.hello(), OpenEngine) == [], "and never again on it"
    assert only(prefill.hello(generation=2), OpenEngine) != []


def test_one_engine_per_pair_a_taint_disturbs_nobody_else(prefill: Prefill) -> None:
    prefill.pair()
    prefill.pair(decode=OTHER_DECODE)
    prefill.rank_ended(prefill.grant(), Outcome.UNSETTLED)
    assert engines(prefill, OTHER_DECODE) == {1: EngineState.OPEN}
    prefill.grant(decode=OTHER_DECODE)


def test_lost_peer_that_returns_with_the_same_incarnation_goes_on(prefill: Prefill) -> None:
    prefill.pair()
    effects = []
    for _ in range(12):
        effects += prefill.tick(0.5)
    assert only(effects, CloseEngine) == [CloseEngine(DECODE, 1)]
    assert one(sent(prefill.receive(prefill.make_grant()))).reason is Reason.BELOW_FLOOR
    assert only(prefill.hello(), OpenEngine) == []
    assert one(only(prefill.engine_closed(), OpenEngine)).generation == 1
    prefill.engine_opened()
    prefill.grant()


def test_peer_lost_while_its_engine_opens(prefill: Prefill) -> None:
    prefill.hello()
    for _ in range(12):
        prefill.tick(0.5)
    assert engines(prefill) == {1: EngineState.OPENING}
    assert prefill.engine_opened() == [CloseEngine(DECODE, 1)], "too late; and one step at a time"
    assert prefill.engine_closed() == []
    assert engines(prefill) == {}


def test_engine_that_cannot_be_destroyed_ends_the_worker(prefill: Prefill) -> None:
    prefill.pair()
    room = prefill.grant()
    prefill.rank_ended(room, Outcome.UNSETTLED)
    for _ in range(int(CONFIG.retire_seconds_max)):
        prefill.hello()
        assert prefill.tick(1.0) == []
    whose = "generation 1 of decode worker 00000000000000d0"
    why = f"ranks [0] cannot destroy the test engine of {whose}"
    assert ends_worker(prefill.tick(0.5)) == why
    assert prefill.released == [], "and its pages stay"


def test_engine_that_does_not_open_in_time_is_refused_and_tried_again() -> None:
    prefill = Prefill(ranks=2)
    prefill.hello()
    prefill.table.engine_opened(DECODE, 1, 0, prefill.now)
    effects = []
    for _ in range(int(CONFIG.retire_seconds_max) + 1):
        prefill.hello()
        prefill.table.rank_heard(1, prefill.now)
        effects += prefill.tick(1.0)
    welcome = one(sent(effects))
    assert welcome.refusal == "test: ranks [1] did not open their engines in time"
    assert one(only(effects, CloseEngine)) == CloseEngine(DECODE, 1)
    prefill.engine_closed(0)
    prefill.engine_closed(1)
    assert one(only(prefill.hello(), OpenEngine)).generation == 1


def test_worker_that_was_asleep_waits_for_its_engines(prefill: Prefill) -> None:
    prefill.pair()
    prefill.rank_ended(prefill.grant(), Outcome.UNSETTLED)
    assert prefill.tick(3600.0) == []
    assert prefill.tick(0.5) == []
    prefill.engine_closed()
    assert len(prefill.released) == 1


def test_answers_for_engines_that_are_gone_change_nothing(prefill: Prefill) -> None:
    prefill.pair()
    assert prefill.engine_opened(7) == []
    assert prefill.note(prefill.table.engine_refused(DECODE, 1, "late", prefill.now)) == []
    assert prefill.engine_closed() == [], "nobody asked for it"
    assert engines(prefill) == {1: EngineState.OPEN}


def test_load_is_told_with_the_next_welcome(prefill: Prefill) -> None:
    prefill.pair()
    load = msgspec.structs.replace(prefill.table.peers.load, running=3, pages_free=9)
    prefill.table.set_load(load)
    assert one(sent(prefill.hello())).load == load
