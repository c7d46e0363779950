"""Names of lives and things."""

from __future__ import annotations

from pdrt.ids import Incarnation, RequestId, RoomId, new_incarnation, routing_id, short


def test_incarnations_are_64_random_bits_and_never_0() -> None:
    drawn = {new_incarnation() for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(0 < incarnation < 2**64 for incarnation in drawn)


def test_routing_ids_are_distinct_and_do_not_start_with_the_reserved_0() -> None:
    smallest, largest = routing_id(Incarnation(1)), routing_id(Incarnation(2**64 - 1))
    assert smallest == b"w" + bytes(7) + b"\x01"
    assert largest == b"w" + b"\xff" * 8


def test_names_as_people_see_them() -> None:
    incarnation = Incarnation(0xAB)
    assert short(incarnation) == "00000000000000ab"
    assert str(RoomId(incarnation, 7)) == "00000000000000ab/7"
    assert str(RequestId(incarnation, 7, 2)) == "00000000000000ab/7.2"


def test_rooms_are_ordered_by_serial_within_an_incarnation() -> None:
    rooms = [RoomId(Incarnation(1), serial) for serial in (3, 1, 2)]
    assert [room.serial for room in sorted(rooms)] == [1, 2, 3]
