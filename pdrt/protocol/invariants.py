"""What a worker's tables and its pool must say of each other (I1). Pure.

Workers call these when idle and on demand, the simulator after every event. They never repair
anything: a worker that fails one ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdrt.ids import RoomId
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.protocol.leases import LeaseTable
from pdrt.protocol.rooms import RoomTable


def check_decode(table: LeaseTable, pages: PageTable) -> None:
    """Exactly the pages of alive leases are owned by leases, each by its own.

    Raises:
        AssertionError: naming the leases that the two disagree on.
    """
    listed = {
        Owner(OwnerKind.LEASE, room): set(lease.pages)
        for room, lease in table.leases.items()
        if lease.pages
    }
    owned = pages.pages_of(OwnerKind.LEASE)
    assert listed == owned, _difference(listed, owned)


def check_prefill(
    table: RoomTable, room_pages: Mapping[RoomId, Collection[int]], pages: PageTable
) -> None:
    """Exactly the pages of `room_pages`, what a worker keeps for each room, are owned by rooms or,
    being cached ones, held by them, and each of these rooms is alive or retained by its engine
    instance.

    Raises:
        AssertionError: naming the rooms that the two disagree on.
    """
    listed = {Owner(OwnerKind.ROOM, room): set(kept) for room, kept in room_pages.items() if kept}
    owned, held = pages.pages_of(OwnerKind.ROOM), pages.held_by(OwnerKind.ROOM)
    found = {owner: owned.get(owner, set()) | held.get(owner, set()) for owner in {**owned, **held}}
    assert listed == found, _difference(listed, found)
    known = table.rooms.keys() | table.peers.retained_rooms()
    assert room_pages.keys() == known, room_pages.keys() ^ known


def _difference(listed: dict[Owner, set[int]], owned: dict[Owner, set[int]]) -> str:
    rooms = [o for o in listed.keys() | owned.keys() if listed.get(o) != owned.get(o)]
    return "; ".join(
        f"{room.key}: table {sorted(listed.get(room, ()))}, pool {sorted(owned.get(room, ()))}"
        for room in rooms
    )
