"""What ranks hold, against what their leader believes: every contradiction is named, and what is
merely under way is none."""

from __future__ import annotations

import pytest

from pdrt.ids import Incarnation, RoomId
from pdrt.transfer.rank_check import NAMED_MAX, RankCheck, Verdict, check_own, differs
from pdrt.transfer.rank_messages import Checked, Held, HeldEngine, HeldRoom, HeldSegment

DECODE = Incarnation(0xD0)
ROOM = HeldRoom(RoomId(DECODE, 7), 2, (4, 5))
SEGMENT = HeldSegment("tcp://127.0.0.1:1", 2)
ENGINE = HeldEngine(DECODE, 2, "tcp")


class Leader:
    """What it believes of each rank."""

    def __init__(self, *held: Held) -> None:
        self.held = set(held)

    def believed(self, rank: int) -> frozenset[Held]:
        return frozenset(self.held)

    def ask(self, *ranks: int) -> RankCheck:
        return RankCheck(ranks, self.believed)


def test_what_agrees_is_nothing_to_speak_of() -> None:
    check = Leader(ROOM, ENGINE).ask(1, 2)
    for rank in (1, 2):
        assert not check.is_over.is_set()
        check.answered(rank, Checked(1, (ENGINE, ROOM)))
    assert check.is_over.is_set()
    assert check.verdict() == Verdict((), ())


@pytest.mark.parametrize("held", [ROOM, SEGMENT, ENGINE])
def test_what_a_rank_lacks_or_has_too_much_is_named_with_the_rank(held: Held) -> None:
    check = Leader(held).ask(1, 2, 3)
    check.answered(1, Checked(1, (held,)))
    check.answered(2, Checked(1, ()))
    assert check.verdict() == Verdict(
        (f"rank 2 and its leader disagree: the rank lacks {held.words}",), (3,)
    )
    check = Leader().ask(1)
    check.answered(1, Checked(1, (held,)))
    assert check.verdict().broken == (
        f"rank 1 and its leader disagree: the leader does not know of {held.words}",
    )


@pytest.mark.parametrize(
    "other",
    [
        HeldRoom(ROOM.room, 2, (4, 6)),
        HeldRoom(ROOM.room, 3, (4, 5)),
        HeldRoom(RoomId(DECODE, 8), 2, (4, 5)),
    ],
)
def test_a_room_is_its_pages_and_its_generation_too(other: Held) -> None:
    check = Leader(ROOM).ask(1)
    check.answered(1, Checked(1, (other,)))
    (broken,) = check.verdict().broken
    assert ROOM.words in broken and other.words in broken and ROOM.words != other.words


def test_what_began_or_ended_meanwhile_may_be_there_or_not() -> None:
    for held in ((), (ENGINE,), (ROOM,), (ENGINE, ROOM)):
        leader = Leader(ROOM)
        check = leader.ask(1)
        leader.held = {ENGINE}
        check.answered(1, Checked(1, held))
        assert check.verdict().broken == (), held


def test_what_is_broken_on_a_rank_comes_first() -> None:
    check = Leader(ROOM).ask(1, 2)
    check.answered(1, Checked(1, broken="7 in flight"))
    assert check.verdict().complaints() == ("rank 1: 7 in flight", "rank 2 does not answer")


def test_rank_0_is_never_behind() -> None:
    check_own(frozenset({ROOM, ENGINE}), (ENGINE, ROOM))
    with pytest.raises(AssertionError, match="rank 0 and its leader disagree: the rank lacks room"):
        check_own(frozenset({ROOM, ENGINE}), (ENGINE,))


def test_long_lists_are_cut_and_counted() -> None:
    rooms = frozenset(HeldRoom(RoomId(DECODE, n), 1, tuple(range(99))) for n in range(20))
    words = differs(rooms, rooms, ())
    assert words is not None
    assert words.count("room ") == NAMED_MAX
    assert words.endswith("and 12 more") and len(words) < 1000
