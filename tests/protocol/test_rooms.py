"""The prefill leader's rooms: every named rank drains, then the source leaves, then one end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.config import ProtocolConfig
from pdrt.ids import RoomId
from pdrt.protocol.effects import CloseRoom, OpenRoom, ReleaseSource, SendToDecode
from pdrt.protocol.messages import Drained, FirstToken, Outcome, Reason
from pdrt.protocol.rooms import RoomState
from tests.protocol.traces import (
    DECODE,
    FIRST,
    NEXT_WRITER,
    OTHER_DECODE,
    WRITER,
    Prefill,
    ends_worker,
    one,
    only,
    sent,
)


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    prefill.pair()
    yield prefill
    prefill.table.check()


@pytest.fixture
def wide() -> Iterator[Prefill]:
    """Four ranks."""
    prefill = Prefill(ranks=4)
    prefill.pair()
    yield prefill
    prefill.table.check()


# Ends


def test_single_rank_ends_a_room_in_one_step(prefill: Prefill) -> None:
    room = prefill.grant()
    effects = prefill.rank_ended(room, Outcome.COMPLETE)
    drained = Drained(room, WRITER, Outcome.COMPLETE, bytes_written=100)
    assert effects == [SendToDecode(DECODE, drained), ReleaseSource(room)]
    assert prefill.table.rooms == {}


def test_all_ranks_must_end_before_the_source_is_released(wide: Prefill) -> None:
    room = wide.grant()
    for rank in (2, 0, 3):
        assert wide.rank_ended(room, Outcome.COMPLETE, rank) == []
    effects = wide.rank_ended(room, Outcome.COMPLETE, 1)
    assert wide.released == [room]
    assert one(only(effects, SendToDecode)).message == Drained(
        room, WRITER, Outcome.COMPLETE, bytes_written=400
    )


def test_rank_that_reports_again_is_not_counted_twice(wide: Prefill) -> None:
    """TP 4, ranks 1 and 3 report twice: four acknowledgements, two ranks."""
    room = wide.grant()
    for rank in (1, 3, 1, 3):
        assert wide.rank_ended(room, Outcome.COMPLETE, rank) == []
    assert wide.table.stale["rank_ended_again"] == 2
    assert wide.released == []
    assert wide.table.rooms[room].waiting == {0, 2}
    wide.rank_ended(room, Outcome.COMPLETE, 0)
    wide.rank_ended(room, Outcome.COMPLETE, 2)
    assert wide.released == [room]


def test_second_report_cannot_change_what_the_first_said(wide: Prefill) -> None:
    room = wide.grant()
    wide.rank_ended(room, Outcome.UNSETTLED, 1)
    wide.rank_ended(room, Outcome.COMPLETE, 1)
    for rank in (0, 2, 3):
        wide.rank_ended(room, Outcome.ENDED, rank)
    assert one(wide.drained).outcome is Outcome.UNSETTLED


def test_late_rank_end_touches_no_other_room(wide: Prefill) -> None:
    gone, alive = wide.grant(), wide.grant()
    for rank in range(4):
        wide.rank_ended(gone, Outcome.COMPLETE, rank)
    assert wide.rank_ended(gone, Outcome.ENDED, 2) == []
    assert wide.table.rooms[alive].waiting == {0, 1, 2, 3}
    assert wide.table.rooms[alive].state is RoomState.OPEN
    assert wide.released == [gone]


def test_rank_that_does_not_exist_is_not_counted(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.rank_ended(room, Outcome.COMPLETE, rank=1) == []
    assert prefill.released == []


@pytest.mark.parametrize(
    ("others", "outcome"),
    [
        (Outcome.COMPLETE, Outcome.COMPLETE),
        (Outcome.ENDED, Outcome.ENDED),
        (Outcome.UNSETTLED, Outcome.UNSETTLED),
    ],
)
@pytest.mark.parametrize("odd_rank", range(4))
def test_the_worst_rank_decides(
    wide: Prefill, others: Outcome, outcome: Outcome, odd_rank: int
) -> None:
    room = wide.grant()
    for rank in range(4):
        wide.rank_ended(room, others if rank == odd_rank else Outcome.COMPLETE, rank)
    assert one(wide.drained).outcome is outcome
    assert (one(wide.drained).reason is None) == (outcome is Outcome.COMPLETE)


def test_one_rank_that_fails_closes_the_room_on_the_others_and_they_are_waited_for(
    wide: Prefill,
) -> None:
    room = wide.grant()
    effects = wide.rank_ended(room, Outcome.ENDED, 2, Reason.FORWARD_FAILED)
    assert effects == [CloseRoom(room, Reason.FORWARD_FAILED, "")]
    for rank in (0, 1):
        assert wide.rank_ended(room, Outcome.ENDED, rank, Reason.DEADLINE) == []
    assert wide.released == []
    wide.rank_ended(room, Outcome.COMPLETE, 3)
    assert one(wide.drained).reason is Reason.FORWARD_FAILED, "the first reason stays"
    assert wide.released == [room]


def test_room_that_completed_before_its_revoke_took_effect_is_complete(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.revoke(room) == [CloseRoom(room, Reason.CLIENT_GONE, "")]
    prefill.rank_ended(room, Outcome.COMPLETE)
    assert one(prefill.drained).outcome is Outcome.COMPLETE
    assert one(prefill.drained).reason is None


# Unsettled


def test_source_of_an_unsettled_room_stays_until_its_engine_is_destroyed(wide: Prefill) -> None:
    room = wide.grant()
    for rank in range(4):
        wide.rank_ended(room, Outcome.UNSETTLED if rank == 1 else Outcome.ENDED, rank)
    assert one(wide.drained).outcome is Outcome.UNSETTLED
    for rank in (0, 1, 1, 3):
        wide.engine_closed(rank)
        assert wide.released == []
    wide.engine_closed(2)
    assert wide.released == [room]
    wide.engine_closed(2)
    assert wide.released == [room], "destroyed once more: nothing is released twice"


def test_unsettled_room_ends_the_rooms_of_its_generation_only(prefill: Prefill) -> None:
    prefill.pair(decode=OTHER_DECODE)
    dirty, same, other = prefill.grant(), prefill.grant(), prefill.grant(decode=OTHER_DECODE)
    effects = prefill.rank_ended(dirty, Outcome.UNSETTLED)
    assert {x.room for x in only(effects, CloseRoom)} == {dirty, same}
    assert prefill.table.rooms[other].state is RoomState.OPEN
    prefill.rank_ended(same, Outcome.ENDED)
    assert prefill.released == [same], "what has settled is released at once"


@pytest.mark.parametrize("others", [0, 1])
def test_tainted_generation_takes_no_grant(prefill: Prefill, others: int) -> None:
    """Neither once its engine is being destroyed, nor while other rooms drain on it."""
    for _ in range(others):
        prefill.grant()
    prefill.rank_ended(prefill.grant(), Outcome.UNSETTLED)
    effects = prefill.receive(prefill.make_grant())
    drained = one(sent(effects))
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.BELOW_FLOOR)
    assert drained.retryable


# Revoke


def test_revoke_is_answered_by_the_drain(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.revoke(room) == [CloseRoom(room, Reason.CLIENT_GONE, "")]
    assert prefill.revoke(room) == [], "again: nothing new"
    prefill.rank_ended(room, Outcome.ENDED, reason=Reason.CLIENT_GONE)
    drained = one(prefill.drained)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.CLIENT_GONE)
    assert not drained.retryable


def test_revoke_of_an_unknown_room_is_answered_at_once_as_clean(prefill: Prefill) -> None:
    room = RoomId(DECODE, 99)
    drained = Drained(room, WRITER, Outcome.ENDED, Reason.UNKNOWN_ROOM)
    assert prefill.revoke(room) == [SendToDecode(DECODE, drained)]


def test_answer_that_was_lost_is_given_again(prefill: Prefill) -> None:
    room = prefill.grant()
    prefill.rank_ended(room, Outcome.COMPLETE)
    assert one(sent(prefill.revoke(room))).outcome is Outcome.ENDED
    assert prefill.released == [room]


def test_unknown_room_after_a_dirty_end_is_not_clean(prefill: Prefill) -> None:
    room = prefill.grant()
    prefill.rank_ended(room, Outcome.UNSETTLED)
    assert one(sent(prefill.revoke(room))).outcome is Outcome.UNSETTLED
    prefill.engine_closed()
    assert one(sent(prefill.revoke(room))).outcome is Outcome.UNSETTLED, "for as long as it lives"


def test_unknown_room_of_a_newer_generation_is_clean(prefill: Prefill) -> None:
    prefill.rank_ended(prefill.grant(), Outcome.UNSETTLED)
    prefill.pair(generation=2)
    room = RoomId(DECODE, 99)
    assert one(sent(prefill.revoke(room, generation=1))).outcome is Outcome.UNSETTLED
    assert one(sent(prefill.revoke(room, generation=2))).outcome is Outcome.ENDED


def test_dirty_end_of_another_decode_worker_does_not_count(prefill: Prefill) -> None:
    prefill.pair(decode=OTHER_DECODE)
    prefill.rank_ended(prefill.grant(decode=OTHER_DECODE), Outcome.UNSETTLED)
    assert one(sent(prefill.revoke(RoomId(DECODE, 99)))).outcome is Outcome.ENDED


# seq and incarnations


def test_late_grant_never_takes_effect_after_its_revoke(prefill: Prefill) -> None:
    grant = prefill.make_grant()
    assert one(sent(prefill.revoke(grant.room))).outcome is Outcome.ENDED
    assert prefill.receive(grant) == []
    assert prefill.table.rooms == {}
    assert prefill.table.stale["old_seq"] == 1


def test_grant_and_its_duplicate(prefill: Prefill) -> None:
    grant = prefill.make_grant()
    assert prefill.receive(grant) == [OpenRoom(grant)]
    assert prefill.receive(grant) == []
    assert prefill.table.stale["old_seq"] == 1


def test_room_granted_again_under_a_newer_seq_is_not_opened_again(prefill: Prefill) -> None:
    room = prefill.grant()
    again = prefill.make_grant(room=room)
    assert prefill.receive(again) == []
    assert prefill.table.stale["room_again"] == 1


@pytest.mark.parametrize("step", [-1, 0])
def test_old_and_equal_seq_change_nothing(prefill: Prefill, step: int) -> None:
    room = prefill.grant()
    assert prefill.revoke(room, seq=prefill.seq + step) == []
    assert prefill.table.rooms[room].state is RoomState.OPEN
    assert prefill.table.stale["old_seq"] == 1


def test_revoke_that_was_dropped_as_old_is_taken_with_a_fresh_seq(prefill: Prefill) -> None:
    room = prefill.grant()
    overtaken = prefill.next_seq()
    prefill.hello()
    assert prefill.revoke(room, seq=overtaken) == []
    assert prefill.revoke(room) == [CloseRoom(room, Reason.CLIENT_GONE, "")]


def test_each_decode_incarnation_has_its_own_count(prefill: Prefill) -> None:
    prefill.hello(decode=OTHER_DECODE, seq=1)
    prefill.engine_opened(decode=OTHER_DECODE)
    effects = prefill.receive(prefill.make_grant(decode=OTHER_DECODE, seq=2))
    assert one(only(effects, OpenRoom)).grant.room.decode == OTHER_DECODE


def test_messages_for_another_writer_change_nothing_and_leave_the_seq(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.revoke(room, writer=NEXT_WRITER, seq=prefill.seq + 10) == []
    assert prefill.receive(prefill.make_grant(writer=NEXT_WRITER)) == []
    assert prefill.table.stale["other_incarnation"] == 2
    assert prefill.table.rooms[room].state is RoomState.OPEN
    assert prefill.revoke(room) == [CloseRoom(room, Reason.CLIENT_GONE, "")]


def test_decode_incarnation_that_never_said_hello_is_not_heard(prefill: Prefill) -> None:
    assert prefill.receive(prefill.make_grant(decode=OTHER_DECODE)) == []
    assert prefill.revoke(RoomId(OTHER_DECODE, 1)) == []
    assert prefill.table.stale["other_incarnation"] == 2
    assert OTHER_DECODE not in prefill.table.peers.known


# Refusals


def refusal_of(prefill: Prefill, refusal: str | None = None, **changes: object) -> Drained:
    effects = prefill.receive(prefill.make_grant(**changes), refusal)
    drained = one(sent(effects))
    assert isinstance(drained, Drained)
    assert drained.outcome is Outcome.ENDED
    assert prefill.released == [], "nothing was taken, nothing is released"
    return drained


def test_rejected_prompt_is_not_retried(prefill: Prefill) -> None:
    drained = refusal_of(prefill, "prompt of 40 tokens, 32 allowed")
    assert (drained.reason, drained.retryable) == (Reason.REJECTED, False)
    assert "32 allowed" in drained.detail


def test_grant_beyond_rooms_max_is_refused_and_may_go_elsewhere() -> None:
    prefill = Prefill(config=ProtocolConfig(rooms_max=2))
    prefill.pair()
    first = prefill.grant()
    prefill.grant()
    drained = refusal_of(prefill)
    assert (drained.reason, drained.retryable) == (Reason.OVERLOADED, True)
    prefill.rank_ended(first, Outcome.COMPLETE)
    prefill.grant()


def test_grant_on_a_generation_without_an_engine_is_refused(prefill: Prefill) -> None:
    assert refusal_of(prefill, generation=2).reason is Reason.BELOW_FLOOR


def test_leaving_worker_takes_nothing_new_and_finishes_what_it_has(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.note(prefill.table.leave()) == []
    drained = refusal_of(prefill)
    assert (drained.reason, drained.retryable) == (Reason.SHUTDOWN, True)
    welcome = one(sent(prefill.hello()))
    assert welcome.refusal == "this prefill worker is leaving"
    assert welcome.rooms == (room.serial,), "a room that runs is still listed"
    prefill.rank_ended(room, Outcome.COMPLETE)
    assert prefill.released == [room]


# First token


def test_first_token_is_sent_the_moment_it_is_known_and_repeated_at_the_end(
    prefill: Prefill,
) -> None:
    room = prefill.grant()
    effects = prefill.note(prefill.table.first_token(room, FIRST))
    assert effects == [SendToDecode(DECODE, FirstToken(room, WRITER, FIRST))]
    prefill.rank_ended(room, Outcome.COMPLETE)
    assert one(prefill.drained).first == FIRST


def test_late_first_token_of_a_room_that_closed_or_went_is_dropped(prefill: Prefill) -> None:
    closing, gone, alive = prefill.grant(), prefill.grant(), prefill.grant()
    prefill.revoke(closing)
    prefill.rank_ended(gone, Outcome.COMPLETE)
    assert prefill.table.first_token(closing, FIRST) == []
    assert prefill.table.first_token(gone, FIRST) == []
    assert prefill.table.rooms[alive].first is None


# Time


def test_room_past_its_deadline_closes_and_is_drained_like_any_other(prefill: Prefill) -> None:
    room = prefill.grant(seconds_max=0.5)
    later = prefill.grant(seconds_max=5.0)
    assert prefill.tick(0.4) == []
    assert prefill.tick(0.2) == [CloseRoom(room, Reason.DEADLINE, "")]
    assert prefill.tick(0.2) == [], "said once"
    assert prefill.released == [], "time frees nothing"
    prefill.rank_ended(room, Outcome.ENDED)
    assert (one(prefill.drained).reason, one(prefill.drained).retryable) == (Reason.DEADLINE, False)
    assert prefill.table.rooms[later].state is RoomState.OPEN


def test_decode_worker_that_is_silent_is_lost_with_all_its_rooms(prefill: Prefill) -> None:
    prefill.pair(decode=OTHER_DECODE)
    room, other = prefill.grant(), prefill.grant(decode=OTHER_DECODE)
    effects = []
    for _ in range(11):
        prefill.hello(decode=OTHER_DECODE)
        effects += prefill.tick(0.5)
    assert only(effects, CloseRoom) == [CloseRoom(room, Reason.DECODE_LOST, "")]
    assert prefill.released == []
    prefill.rank_ended(room, Outcome.ENDED)
    assert prefill.released == [room], "the source is released on this side's own proof"
    assert prefill.table.rooms[other].state is RoomState.OPEN


def test_any_accepted_message_is_a_sign_of_life(prefill: Prefill) -> None:
    room = prefill.grant()
    for _ in range(12):
        prefill.revoke(RoomId(DECODE, 99))
        assert only(prefill.tick(0.5), CloseRoom) == []
    assert prefill.table.rooms[room].state is RoomState.OPEN


def test_stale_message_is_no_sign_of_life(prefill: Prefill) -> None:
    prefill.grant()
    effects = []
    for _ in range(11):
        prefill.hello(seq=1)
        effects += prefill.tick(0.5)
    assert one(only(effects, CloseRoom)).reason is Reason.DECODE_LOST


def test_own_accord_end_is_idempotent_and_unknown_rooms_are_ignored(prefill: Prefill) -> None:
    room = prefill.grant()
    assert prefill.table.end_room(RoomId(DECODE, 99), Reason.FORWARD_FAILED) == []
    effects = prefill.note(prefill.table.end_room(room, Reason.FORWARD_FAILED, "nan"))
    assert effects == [CloseRoom(room, Reason.FORWARD_FAILED, "nan")]
    assert prefill.table.end_room(room, Reason.DEADLINE) == []
    prefill.rank_ended(room, Outcome.ENDED, reason=Reason.DEADLINE)
    assert (one(prefill.drained).reason, one(prefill.drained).detail) == (
        Reason.FORWARD_FAILED,
        "nan",
    )


def test_rank_that_hangs_ends_the_worker(wide: Prefill) -> None:
    effects = []
    for _ in range(11):
        wide.hello()
        for rank in (1, 3):
            wide.table.rank_heard(rank, wide.now)
        effects += wide.tick(0.5)
    assert ends_worker(effects) == "rank 2 has been silent for 5 s (--silence-seconds)"
