"""Pairing: handshake, heartbeat, generations, and endpoints that come and go."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from pdrt.config import ProtocolConfig
from pdrt.protocol.effects import (
    CloseFence,
    CloseSegment,
    Connect,
    Disconnect,
    EndLease,
    FailRoom,
    OpenFence,
    OpenSegment,
    SendToPrefill,
)
from pdrt.protocol.messages import PROTOCOL_VERSION, Hello, Load, Outcome, Reason
from pdrt.protocol.writers import PairState
from tests.protocol.traces import (
    CONFIG,
    ENDPOINT,
    FINGERPRINT,
    LAYOUT,
    LOCAL,
    NEXT_WRITER,
    OTHER_DECODE,
    OTHER_ENDPOINT,
    RETIRE,
    WRITER,
    Decode,
    ends_worker,
    one,
    only,
    segment,
    sent,
)


@pytest.fixture
def decode() -> Iterator[Decode]:
    decode = Decode()
    yield decode
    decode.table.check()


@pytest.fixture
def paired() -> Iterator[Decode]:
    decode = Decode(LOCAL)
    decode.pair()
    yield decode
    decode.table.check()


def pair_state(decode: Decode, endpoint: str = ENDPOINT) -> PairState:
    return decode.pairing.peers[endpoint].state


# Handshake


def test_from_wanted_to_paired() -> None:
    decode = Decode(LOCAL, ranks=2)
    assert decode.want() == [Connect(ENDPOINT), OpenSegment(ENDPOINT, 1)]
    assert decode.want() == [], "idempotent"
    assert decode.tick() == [], "nothing to show yet"
    assert decode.open_segment(1) == []
    effects = decode.open_segment(0)
    hello = one(sent(effects))
    assert isinstance(hello, Hello)
    assert (hello.generation, hello.floor) == (1, 1)
    assert hello.segments == (segment(0, 1), segment(1, 1)), "by rank"
    assert pair_state(decode) is PairState.CONNECTING
    assert only(decode.welcome(), OpenFence) != []
    decode.fence_opened()
    assert pair_state(decode) is PairState.PAIRED
    assert decode.table.usable_endpoints() == [ENDPOINT]


def test_segment_answers_for_what_is_gone_change_nothing(paired: Decode) -> None:
    hellos = len(paired.sent)
    assert paired.open_segments(1) == [], "already open"
    assert paired.open_segments(5) == []
    assert paired.close_segments(1) == [], "nobody asked for it"
    assert len(paired.sent) == hellos


def test_refusal_names_both_values_and_is_lifted_by_a_later_welcome(decode: Decode) -> None:
    decode.want()
    decode.open_segments()
    layout = msgspec.structs.replace(LAYOUT, dtype="float32", head_dim=64)
    other = msgspec.structs.replace(FINGERPRINT, layout=layout, model="n", protocol_version=9)
    decode.welcome(fingerprint=other)
    decode.fence_opened()
    assert decode.pairing.peers[ENDPOINT].refusal == (
        f"protocol_version: {PROTOCOL_VERSION} != 9; model: m != n; "
        "dtype: bfloat16 != float32; head_dim: 8 != 64"
    )
    assert pair_state(decode) is PairState.REFUSED
    assert decode.table.usable_endpoints() == []
    decode.tick(1.0)
    decode.welcome()
    assert decode.table.usable_endpoints() == [ENDPOINT]


def test_refusal_in_the_writers_own_words(paired: Decode) -> None:
    room = paired.grant([1])
    paired.tick(1.0)
    assert paired.welcome(refusal="this prefill worker is leaving") == []
    assert paired.table.usable_endpoints() == []
    assert paired.drained(room, Outcome.ENDED) != [], "what it still has goes on"


# Welcome: seq and incarnations


def test_welcome_for_another_incarnation_or_endpoint_changes_nothing(paired: Decode) -> None:
    paired.tick(1.0)
    peer = paired.pairing.peers[ENDPOINT]
    before = dict(vars(peer))
    assert paired.welcome(NEXT_WRITER, decode=OTHER_DECODE) == []
    assert paired.receive(paired.answer(NEXT_WRITER), "tcp://unheard-of:1") == []
    assert vars(peer) == before
    assert paired.table.stale["other_incarnation"] == 2


@pytest.mark.parametrize("offset", [-1, 0])
def test_welcome_that_is_not_newer_does_not_switch_the_writer(paired: Decode, offset: int) -> None:
    paired.tick(1.0)
    paired.welcome()
    last = paired.pairing.peers[ENDPOINT].last_seq
    assert paired.welcome(NEXT_WRITER, seq=last + offset) == []
    assert paired.pairing.peers[ENDPOINT].writer == WRITER
    assert paired.table.stale["old_seq"] == 1


def test_welcome_for_a_hello_that_was_never_sent_is_dropped(paired: Decode) -> None:
    paired.tick(1.0)
    assert paired.welcome(NEXT_WRITER, seq=paired.last_hello().seq + 1) == []
    assert paired.pairing.peers[ENDPOINT].writer == WRITER


def test_welcome_that_answers_the_hello_to_another_endpoint_is_dropped(paired: Decode) -> None:
    paired.pair(NEXT_WRITER, OTHER_ENDPOINT)
    paired.tick(1.0)
    meant_for_other = paired.last_hello(OTHER_ENDPOINT)
    assert paired.welcome(NEXT_WRITER, hello=meant_for_other) == []
    assert paired.pairing.peers[ENDPOINT].writer == WRITER
    assert paired.table.stale["other_endpoint"] == 1


def test_only_a_welcome_switches_the_writer(paired: Decode) -> None:
    room = paired.grant([1])
    paired.drained(room, Outcome.ENDED, writer=NEXT_WRITER)
    paired.first(room, writer=NEXT_WRITER)
    assert paired.pairing.peers[ENDPOINT].writer == WRITER
    paired.tick(1.0)
    paired.welcome(NEXT_WRITER, rooms=[])
    assert paired.pairing.peers[ENDPOINT].writer == NEXT_WRITER


def test_grants_go_only_to_a_writer_that_has_echoed_the_newest_generation(paired: Decode) -> None:
    paired.tick(1.0)
    paired.welcome(generation=0)
    assert paired.table.usable_endpoints() == []
    paired.tick(1.0)
    paired.welcome(NEXT_WRITER)
    assert paired.table.usable_endpoints() == [], "the means to fence the new one"
    paired.fence_opened(NEXT_WRITER)
    assert paired.table.usable_endpoints() == [ENDPOINT]


def test_welcome_after_disconnect_is_dropped(paired: Decode) -> None:
    paired.tick(1.0)
    late = paired.answer()
    paired.table.unwant(ENDPOINT)
    paired.tick()
    paired.close_segments()
    assert Disconnect(ENDPOINT) in paired.tick()
    assert paired.receive(late) == []
    assert paired.table.stale["not_connected"] == 1
    assert paired.pairing.peers[ENDPOINT].fences == {}


# Heartbeat


def hello_times(decode: Decode, seconds: float, *, answering: bool) -> list[float]:
    times = []
    until = decode.now + seconds
    while decode.now < until:
        for effect in only(decode.tick(), SendToPrefill):
            if isinstance(effect.message, Hello):
                times.append(round(decode.now, 1))
                if answering:
                    decode.welcome()
    return times


def test_heartbeat_to_who_answers_and_quick_tries_at_first(decode: Decode) -> None:
    start = decode.now
    decode.want()
    decode.open_segments()
    early = [round(x - start, 1) for x in hello_times(decode, 1.6, answering=False)]
    assert early == pytest.approx([0.1, 0.3, 0.7, 1.5], abs=0.11)
    decode.welcome()
    times = hello_times(decode, 10, answering=True)
    assert len(times) == pytest.approx(10 / CONFIG.hello_interval_seconds, abs=1)


def test_writer_is_lost_when_silent_and_found_again(paired: Decode) -> None:
    room = paired.grant([], max_tokens=1)
    effects = paired.wait(5.6, answering=False)
    assert only(effects, FailRoom) == [FailRoom(room, Reason.WRITER_LOST, True, "")]
    assert pair_state(paired) is PairState.LOST
    assert paired.table.usable_endpoints() == []
    assert len(hello_times(paired, 0.8, answering=False)) >= 3, "asked for often"
    paired.welcome()
    assert paired.table.usable_endpoints() == [ENDPOINT]
    assert only(paired.wait(20), FailRoom) == []


def test_whoever_was_asleep_accuses_nobody(paired: Decode) -> None:
    room = paired.grant([1])
    assert only(paired.tick(3600.0), FailRoom) == []
    assert only(paired.wait(4.5, answering=False), FailRoom) == []
    effects = paired.wait(1.0, answering=False)
    assert only(effects, FailRoom) == [FailRoom(room, Reason.WRITER_LOST, True, "")]


def test_endpoint_that_never_answered_is_not_lost(decode: Decode) -> None:
    decode.want()
    decode.open_segments()
    decode.wait(60, answering=False)
    assert pair_state(decode) is PairState.CONNECTING


def test_load_is_told_with_the_next_hello(paired: Decode) -> None:
    load = Load(running=3, pages_free=9, pages_total=10)
    paired.table.set_load(load)
    paired.tick(1.0)
    assert paired.last_hello().load == load


def test_rank_that_does_not_open_its_segment_ends_the_worker(decode: Decode) -> None:
    decode.want()
    effects = decode.wait(CONFIG.retire_seconds_max + 1, answering=False)
    whys = {ends_worker([x]) for x in effects if type(x).__name__ == "EndWorker"}
    assert whys == {f"ranks [0] did not confirm opening generation 1 of {ENDPOINT} in time"}


# Wanted and unwanted


def test_unwanted_endpoint_is_retired_then_let_go(paired: Decode) -> None:
    paired.table.unwant(ENDPOINT)
    assert only(paired.tick(), CloseSegment) == [CloseSegment(ENDPOINT, 1)]
    assert paired.table.usable_endpoints() == []
    assert only(paired.tick(), Disconnect) == []
    paired.close_segments()
    assert paired.tick() == [CloseFence(ENDPOINT, WRITER), Disconnect(ENDPOINT)]
    assert paired.tick(20.0) == [], "nothing is left to say"


def test_unwanted_endpoint_is_kept_until_its_last_lease_is_gone(paired: Decode) -> None:
    rooms = [paired.grant([1]), paired.grant([2])]
    paired.table.unwant(ENDPOINT)
    assert only(paired.wait(5), CloseSegment) == []
    paired.drained(rooms[0], Outcome.ENDED)
    assert only(paired.wait(5), CloseSegment) == []
    effects = paired.drained(rooms[1], Outcome.ENDED)
    assert effects[1:] == [EndLease(rooms[1]), CloseSegment(ENDPOINT, 1)]
    assert paired.table.fences == 0, "nobody had to be fenced"


def test_wanted_again_goes_on_with_a_generation_never_used_before(paired: Decode) -> None:
    paired.table.unwant(ENDPOINT)
    paired.tick()
    paired.close_segments()
    paired.tick()
    assert paired.want() == [Connect(ENDPOINT), OpenSegment(ENDPOINT, 2)]
    [hello] = sent(paired.open_segments(2))
    assert hello.floor == 2
    paired.welcome()
    assert paired.table.usable_endpoints() == [], "the means to fence were given up"
    paired.fence_opened()
    assert paired.table.usable_endpoints() == [ENDPOINT]
    paired.grant([1])


def test_wanted_again_while_it_is_being_let_go(paired: Decode) -> None:
    paired.table.unwant(ENDPOINT)
    paired.tick()
    assert paired.want() == [], "the old generation first"
    effects = paired.close_segments()
    assert effects == [OpenSegment(ENDPOINT, 2)]
    assert only(paired.wait(2), Disconnect) == []
    paired.open_segments(2)
    paired.welcome()
    assert paired.table.usable_endpoints() == [ENDPOINT]


def test_unwant_of_an_unknown_endpoint_is_nothing(decode: Decode) -> None:
    decode.table.unwant(ENDPOINT)
    assert decode.pairing.peers == {}


def test_fence_on_an_unwanted_endpoint_opens_no_further_generation() -> None:
    paired = Decode(RETIRE)
    paired.pair()
    room = paired.grant([1])
    paired.table.unwant(ENDPOINT)
    effects = paired.drained(room, Outcome.UNSETTLED)
    assert only(effects, OpenSegment) == []
    effects = paired.close_segments()
    assert only(effects, EndLease) == [EndLease(room)]
    assert Disconnect(ENDPOINT) in [*effects, *paired.tick()]


# Bounds


def test_endpoints_are_bounded_and_one_let_go_makes_place() -> None:
    decode = Decode(config=ProtocolConfig(prefill_endpoints_max=1))
    decode.pair()
    assert decode.want(OTHER_ENDPOINT) == []
    assert decode.table.stale["prefill_endpoints_max"] == 1
    decode.table.unwant(ENDPOINT)
    decode.tick()
    assert decode.want(OTHER_ENDPOINT) == [], "its segment is still being torn down"
    decode.close_segments()
    decode.tick()
    assert Connect(OTHER_ENDPOINT) in decode.want(OTHER_ENDPOINT)
    assert list(decode.pairing.peers) == [OTHER_ENDPOINT]


def test_forgotten_endpoint_never_sees_an_old_generation_or_seq() -> None:
    decode = Decode(config=ProtocolConfig(prefill_endpoints_max=1))
    decode.pair()
    decode.tick(1.0)
    late = decode.answer()
    for endpoint, other in ((ENDPOINT, OTHER_ENDPOINT), (OTHER_ENDPOINT, ENDPOINT)):
        newest = decode.pairing.peers[endpoint].newest_generation
        decode.table.unwant(endpoint)
        decode.tick()
        decode.close_segments(newest, endpoint)
        decode.tick()
        decode.pair(WRITER if other == ENDPOINT else NEXT_WRITER, other)
        assert decode.pairing.peers[other].newest_generation > newest
    assert decode.receive(late) == []
    assert sum(decode.table.stale.values()) == 1


def test_late_answers_about_a_forgotten_endpoint_change_nothing(decode: Decode) -> None:
    gone = "tcp://forgotten:1"
    assert decode.fence_opened(WRITER, gone) == []
    assert decode.note(decode.table.fence_refused(gone, WRITER, "gone")) == []
    assert decode.note(decode.table.writer_dead(gone, WRITER, decode.now)) == []
    assert decode.pairing.peers == {}


def test_time_goes_by_endpoints_that_were_let_go() -> None:
    """They are remembered, and cost nothing: there may be a hundred times as many as live ones."""
    decode = Decode()
    decode.pair(WRITER, ENDPOINT)
    decode.pair(NEXT_WRITER, OTHER_ENDPOINT)
    assert decode.pairing.attended() == [ENDPOINT, OTHER_ENDPOINT]
    decode.table.unwant(OTHER_ENDPOINT)
    decode.tick()
    assert decode.pairing.attended() == [ENDPOINT, OTHER_ENDPOINT], "it is being torn down"
    decode.close_segments(1, OTHER_ENDPOINT)
    decode.tick()
    assert decode.pairing.attended() == [ENDPOINT]
    assert list(decode.pairing.peers) == [ENDPOINT, OTHER_ENDPOINT]
    decode.want(OTHER_ENDPOINT)
    assert decode.pairing.attended() == [ENDPOINT, OTHER_ENDPOINT]
