"""The decode leader's leases: what ends them, what frees their pages, and what changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.effects import (
    EndLease,
    FailRoom,
    LeaseReady,
    SendToPrefill,
    TakeFirstToken,
)
from pdrt.protocol.leases import LeaseState
from pdrt.protocol.messages import NOT_RETRYABLE, Grant, Outcome, Reason, Revoke
from tests.protocol.traces import (
    CONFIG,
    ENDPOINT,
    FIRST,
    NEXT_WRITER,
    OTHER_DECODE,
    OTHER_ENDPOINT,
    RETIRE,
    WRITER,
    Decode,
    ends_worker,
    one,
    only,
    sent,
)


@pytest.fixture
def decode() -> Iterator[Decode]:
    decode = Decode()
    decode.pair()
    yield decode
    decode.table.check()


def state(decode: Decode, room: RoomId) -> LeaseState:
    return decode.table.leases[room].state


# Grants


def test_grant_names_room_writer_generation_and_the_pages_to_be_written(decode: Decode) -> None:
    expected = decode.table.next_room()
    room = decode.grant([4, 5, 6], written=2, output_tokens=3)
    assert room == expected
    [grant] = [x.message for x in decode.sent if isinstance(x.message, Grant)]
    assert (grant.room, grant.writer, grant.generation) == (room, WRITER, 1)
    assert grant.pages == (4, 5), "the last page is for tokens that decode computes"
    assert decode.table.leases[room].pages == (4, 5, 6)
    assert grant.output_tokens == 3


def test_rooms_and_seqs_are_never_reused_over_all_endpoints(decode: Decode) -> None:
    decode.pair(NEXT_WRITER, OTHER_ENDPOINT)
    rooms = [decode.grant([1]), decode.grant([2], OTHER_ENDPOINT), decode.grant([3])]
    for room in rooms:
        decode.revoke(room)
    assert [room.serial for room in rooms] == [1, 2, 3]
    seqs = [x.message.seq for x in decode.sent]
    assert seqs == sorted(set(seqs)), "one counter, one number per message"
    decode.drained(rooms[2], Outcome.ENDED)
    assert decode.grant([3]).serial == 4


def test_grant_is_never_sent_again(decode: Decode) -> None:
    decode.grant([1])
    decode.wait(30)
    assert len([x for x in decode.sent if isinstance(x.message, Grant)]) == 1


# Ready


def test_complete_after_its_first_token_passes_the_pages_on(decode: Decode) -> None:
    room = decode.grant([1, 2])
    assert decode.first(room) == [TakeFirstToken(room, FIRST)]
    effects = decode.drained(room, Outcome.COMPLETE, bytes_written=5)
    assert effects == [LeaseReady(room, 5)]
    assert decode.freed == [], "pages pass to the sequence, they are not freed"
    assert decode.table.leases == {}


def test_first_token_that_was_lost_is_taken_from_the_drain(decode: Decode) -> None:
    room = decode.grant([1])
    effects = decode.drained(room, Outcome.COMPLETE, first=FIRST)
    assert effects == [TakeFirstToken(room, FIRST), LeaseReady(room, 0)]


def test_first_token_is_taken_once(decode: Decode) -> None:
    room = decode.grant([1])
    decode.first(room)
    assert decode.first(room) == []
    assert decode.drained(room, Outcome.COMPLETE, first=FIRST) == [LeaseReady(room, 0)]
    assert decode.table.stale["first_token"] == 1


def test_complete_without_any_first_token_is_not_ready(decode: Decode) -> None:
    room = decode.grant([1])
    assert decode.drained(room, Outcome.COMPLETE) == [
        FailRoom(room, Reason.NO_FIRST_TOKEN, True, ""),
        EndLease(room),
    ]


def test_request_that_decodes_nothing_needs_no_page_and_no_token(decode: Decode) -> None:
    room = decode.grant([], max_tokens=0)
    assert decode.first(room) == [], "nobody asked for one"
    assert decode.drained(room, Outcome.COMPLETE, first=FIRST) == [LeaseReady(room, 0)]


def test_request_that_has_all_its_tokens_needs_no_other(decode: Decode) -> None:
    room = decode.grant([1], output_tokens=8, max_tokens=8)
    assert decode.drained(room, Outcome.COMPLETE) == [LeaseReady(room, 0)]


# Failed ends


@pytest.mark.parametrize("reason", list(Reason))
@pytest.mark.parametrize("retryable", [True, False])
def test_settled_end_frees_the_pages_and_fails_the_room(
    decode: Decode, reason: Reason, retryable: bool
) -> None:
    room = decode.grant([1])
    effects = decode.drained(
        room, Outcome.ENDED, reason=reason, retryable=retryable, detail="words"
    )
    assert effects == [FailRoom(room, reason, retryable, "words"), EndLease(room)]


def test_drain_after_the_end_changes_nothing(decode: Decode) -> None:
    room, other = decode.grant([1]), decode.grant([2])
    decode.drained(room, Outcome.ENDED)
    for outcome in Outcome:
        assert decode.drained(room, outcome, first=FIRST) == []
    assert decode.first(room) == []
    assert decode.table.stale["unknown_room"] == 4
    assert state(decode, other) is LeaseState.GRANTED
    assert decode.freed == [room]


def test_drain_before_anybody_waits_for_it(decode: Decode) -> None:
    """The writer refuses at once: the drain is the first thing heard of the room."""
    room = decode.grant([1])
    effects = decode.drained(room, Outcome.ENDED, reason=Reason.OVERLOADED)
    assert only(effects, EndLease) == [EndLease(room)]
    assert decode.wait(20) != []
    assert decode.freed == [room]
    assert not [x for x in decode.sent if isinstance(x.message, Revoke)], "nothing left to revoke"


def test_messages_of_another_writer_change_nothing(decode: Decode) -> None:
    room = decode.grant([1])
    for outcome in Outcome:
        assert decode.drained(room, outcome, writer=NEXT_WRITER, first=FIRST) == []
    assert decode.first(room, writer=NEXT_WRITER) == []
    assert decode.table.stale["other_writer"] == 4
    assert state(decode, room) is LeaseState.GRANTED
    assert decode.table.leases[room].first is None


def test_room_of_another_decode_incarnation_changes_nothing(decode: Decode) -> None:
    room = decode.grant([1])
    assert decode.drained(RoomId(OTHER_DECODE, room.serial), Outcome.ENDED) == []
    assert decode.drained(RoomId(room.decode, room.serial + 1), Outcome.ENDED) == []
    assert state(decode, room) is LeaseState.GRANTED


# Revoke


@pytest.mark.parametrize("reason", [Reason.CLIENT_GONE, Reason.DEADLINE, Reason.FENCED])
def test_revoke_fails_the_room_and_frees_nothing(decode: Decode, reason: Reason) -> None:
    room = decode.grant([1])
    fail, send = decode.revoke(room, reason)
    assert fail == FailRoom(room, reason, reason not in NOT_RETRYABLE, "")
    assert isinstance(send, SendToPrefill)
    revoke = send.message
    assert isinstance(revoke, Revoke)
    assert (revoke.room, revoke.writer, revoke.generation) == (room, WRITER, 1)
    assert state(decode, room) is LeaseState.REVOKING
    assert decode.freed == []


def test_revoke_is_idempotent_and_the_room_fails_once(decode: Decode) -> None:
    room = decode.grant([1])
    decode.revoke(room)
    assert decode.revoke(room, Reason.DEADLINE) == []
    effects = decode.drained(room, Outcome.ENDED, reason=Reason.CLIENT_GONE)
    assert effects == [EndLease(room)]


@pytest.mark.parametrize("outcome", [Outcome.COMPLETE, Outcome.ENDED])
def test_any_settled_drain_frees_what_is_being_revoked(decode: Decode, outcome: Outcome) -> None:
    room = decode.grant([1])
    decode.revoke(room)
    assert decode.drained(room, outcome, first=FIRST) == [EndLease(room)], "no token, no READY"


def test_first_token_while_revoking_is_dropped(decode: Decode) -> None:
    room = decode.grant([1])
    decode.revoke(room)
    assert decode.first(room) == []
    assert decode.table.leases[room].first is None


def test_revoke_is_resent_with_fresh_seqs_at_growing_pauses_until_drained(decode: Decode) -> None:
    room = decode.grant([1])
    sent_at = [decode.now]
    decode.revoke(room)
    for _ in range(100):
        effects = decode.tick(0.1)
        sent_at += [decode.now for x in sent(effects) if isinstance(x, Revoke)]
        if decode.last_hello().seq > decode.pairing.peers[ENDPOINT].last_seq:
            decode.welcome()
    pauses = [round(b - a, 1) for a, b in itertools.pairwise(sent_at)]
    assert pauses[:4] == pytest.approx([0.2, 0.4, 0.8, 1.6], abs=0.11)
    assert pauses[4:] == pytest.approx([2.0] * len(pauses[4:]), abs=0.11)
    revokes = [x.message for x in decode.sent if isinstance(x.message, Revoke)]
    assert len({x.seq for x in revokes}) == len(revokes) == len(sent_at)
    decode.drained(room, Outcome.ENDED)
    assert not [x for x in sent(decode.wait(10)) if isinstance(x, Revoke)]


def test_time_alone_frees_no_page() -> None:
    decode = Decode(config=ProtocolConfig(fence_after_seconds=1e9))
    decode.pair()
    room = decode.grant([1])
    decode.revoke(room)
    decode.wait(900)
    assert decode.freed == []
    assert state(decode, room) is LeaseState.REVOKING


def test_revoke_of_a_room_that_has_gone_is_our_own_bug(decode: Decode) -> None:
    room = decode.grant([1])
    decode.drained(room, Outcome.COMPLETE, first=FIRST)
    with pytest.raises(KeyError):
        decode.table.revoke(room, Reason.CLIENT_GONE, decode.now)
    decode.table.check()


# Lost grants


def test_grant_that_two_welcomes_do_not_list_is_revoked(decode: Decode) -> None:
    room = decode.grant([1])
    decode.tick(1.0)
    assert decode.welcome(rooms=[]) == []
    decode.tick(1.0)
    effects = decode.welcome(rooms=[])
    assert only(effects, FailRoom) == [FailRoom(room, Reason.GRANT_LOST, True, "")]
    assert one([x for x in sent(effects) if isinstance(x, Revoke)]).room == room
    assert decode.freed == [], "a lost grant proves nothing about the pages"
    decode.drained(room, Outcome.ENDED, reason=Reason.UNKNOWN_ROOM)
    assert decode.freed == [room]


def test_one_welcome_without_the_room_is_not_enough(decode: Decode) -> None:
    room = decode.grant([1])
    for rooms in ([], [room], [], [room], []):
        decode.tick(1.0)
        assert decode.welcome(rooms=rooms) == []
    assert state(decode, room) is LeaseState.GRANTED


def test_welcomes_for_hellos_older_than_the_grant_do_not_count(decode: Decode) -> None:
    decode.tick(1.0)
    first_hello = decode.last_hello()
    decode.tick(1.0)
    second_hello = decode.last_hello()
    room = decode.grant([1])
    assert decode.welcome(hello=first_hello, rooms=[]) == []
    assert decode.welcome(hello=second_hello, rooms=[]) == []
    assert state(decode, room) is LeaseState.GRANTED


def test_welcome_that_is_repeated_counts_once(decode: Decode) -> None:
    room = decode.grant([1])
    decode.tick(1.0)
    for _ in range(3):
        assert decode.welcome(rooms=[]) == []
    assert decode.table.stale["old_seq"] == 2
    assert state(decode, room) is LeaseState.GRANTED


# Quarantine and bounds


def test_pages_count_as_quarantined_after_a_while_and_stop_admission() -> None:
    decode = Decode(quarantine_pages_max=3)
    decode.pair()
    rooms = [decode.grant([1, 2]), decode.grant([3]), decode.grant([4, 5])]
    decode.revoke(rooms[0])
    decode.wait(CONFIG.quarantine_after_seconds)
    assert decode.table.quarantined_pages(decode.now) == 0
    decode.revoke(rooms[1])
    decode.wait(0.5)
    assert decode.table.quarantined_pages(decode.now) == 2
    assert decode.table.refuses(decode.now) is None
    decode.wait(CONFIG.quarantine_after_seconds)
    assert decode.table.quarantined_pages(decode.now) == 3
    assert decode.table.refuses(decode.now) == (
        "3 pages are quarantined (3 allowed): they come back as their writers drain, or are fenced"
    )
    assert decode.freed == []
    decode.drained(rooms[1], Outcome.ENDED)
    assert decode.table.refuses(decode.now) is None, "drained under pressure: admitted again"
    assert decode.freed == [rooms[1]]


def test_no_false_alarm_while_pages_are_held_by_a_running_room() -> None:
    decode = Decode(quarantine_pages_max=1)
    decode.pair()
    room = decode.grant([1, 2, 3])
    decode.wait(120)
    assert decode.table.quarantined_pages(decode.now) == 0
    assert decode.table.refuses(decode.now) is None
    assert state(decode, room) is LeaseState.GRANTED
    assert decode.table.fences == 0


def test_rooms_max_is_refused_in_words_and_asserted() -> None:
    decode = Decode(config=ProtocolConfig(rooms_max=1))
    decode.pair()
    decode.grant([1])
    assert decode.table.refuses(decode.now) == "1 rooms are alive (rooms_max)"
    with pytest.raises(AssertionError):
        decode.grant([2])
    assert len(decode.table.leases) == 1


def test_page_in_two_leases_is_found(decode: Decode) -> None:
    first = decode.grant([1])
    with pytest.raises(AssertionError, match="a page in two leases"):
        decode.grant([1])
    second = max(decode.table.leases)
    decode.table.leases[second].pages = ()
    decode.drained(first, Outcome.ENDED)


def test_endpoint_that_is_not_usable_is_granted_nothing() -> None:
    decode = Decode(RETIRE)
    decode.want()
    decode.open_segments()
    with pytest.raises(AssertionError):
        decode.grant([1])
    assert decode.table.leases == {}
    assert decode.table.next_room().serial == 1


def test_lease_that_goes_leaves_the_others_alone(decode: Decode) -> None:
    rooms = [decode.grant([page]) for page in range(5)]
    decode.revoke(rooms[1])
    decode.drained(rooms[3], Outcome.ENDED)
    decode.drained(rooms[1], Outcome.ENDED)
    assert decode.freed == [rooms[3], rooms[1]]
    assert set(decode.table.leases) == {rooms[0], rooms[2], rooms[4]}


def test_rank_that_hangs_ends_the_worker() -> None:
    decode = Decode(ranks=3)
    decode.pair()
    effects = []
    for _ in range(11):
        decode.table.rank_heard(2, decode.now)
        effects += decode.tick(0.5)
        decode.welcome()
    assert ends_worker(effects) == "rank 1 has been silent for 5 s (--silence-seconds)"


def test_incarnations_are_not_compared_by_socket(decode: Decode) -> None:
    """The same room's end arrives over another endpoint: it is the writer that counts."""
    decode.pair(Incarnation(0xA7), OTHER_ENDPOINT)
    room = decode.grant([1])
    effects = decode.drained(room, Outcome.ENDED, endpoint=OTHER_ENDPOINT)
    assert only(effects, EndLease) == [EndLease(room)]
