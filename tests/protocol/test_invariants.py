"""I1 across table and pool: what the two must say of each other."""

from __future__ import annotations

import pytest

from pdrt.ids import RoomId
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.protocol.invariants import check_decode, check_prefill
from pdrt.protocol.messages import Outcome
from tests.protocol.traces import Decode, Prefill


def lease(room: RoomId) -> Owner:
    return Owner(OwnerKind.LEASE, room)


def own(room: RoomId) -> Owner:
    return Owner(OwnerKind.ROOM, room)


def test_decode_pool_and_leases_agree_through_a_life() -> None:
    decode, pages = Decode(), PageTable(8)
    decode.pair()
    check_decode(decode.table, pages)
    name = decode.table.next_room()
    room = decode.grant(pages.take(3, lease(name)))
    decode.grant([])
    check_decode(decode.table, pages)
    decode.revoke(room)
    check_decode(decode.table, pages)
    taken = list(decode.table.leases[room].pages)
    decode.drained(room, Outcome.ENDED)
    with pytest.raises(AssertionError, match=rf"{room}: table \[\], pool \[0, 1, 2\]"):
        check_decode(decode.table, pages)
    pages.free(taken, lease(room))
    check_decode(decode.table, pages)


def test_decode_page_freed_too_early_is_found() -> None:
    decode, pages = Decode(), PageTable(8)
    decode.pair()
    name = decode.table.next_room()
    room = decode.grant(pages.take(2, lease(name)))
    pages.free([1], lease(room))
    with pytest.raises(AssertionError, match=rf"{room}: table \[0, 1\], pool \[0\]"):
        check_decode(decode.table, pages)


def test_prefill_pool_and_rooms_agree_through_an_unsettled_end() -> None:
    prefill, pages = Prefill(), PageTable(8)
    prefill.pair()
    room = prefill.grant()
    kept = {room: pages.take(3, own(room))}
    check_prefill(prefill.table, kept, pages)
    prefill.rank_ended(room, Outcome.UNSETTLED)
    check_prefill(prefill.table, kept, pages)
    prefill.engine_closed()
    with pytest.raises(AssertionError):
        check_prefill(prefill.table, kept, pages)
    pages.free(kept.pop(room), own(room))
    check_prefill(prefill.table, kept, pages)


def test_prefill_source_released_too_early_is_found() -> None:
    prefill, pages = Prefill(), PageTable(8)
    prefill.pair()
    room = prefill.grant()
    kept = {room: pages.take(2, own(room))}
    pages.free(kept[room], own(room))
    with pytest.raises(AssertionError, match=r"table \[0, 1\], pool \[\]"):
        check_prefill(prefill.table, kept, pages)
    del kept[room]
    with pytest.raises(AssertionError):
        check_prefill(prefill.table, kept, pages)
