"""Which pages of a rank's pool each room may write: for engines that apply writes themselves.

The decode leader tells every rank of a room before its `Grant` leaves, and again when its lease is
gone. Other ranks than the leader's own may hear of it later than of the first bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from pdrt.ids import RoomId

ROOM_SECONDS_MAX = 5.0
"""How long bytes of a room that was not told of yet may wait for that."""


class AdmitRoom(msgspec.Struct, frozen=True, tag=True):
    """On every rank, before the room's `Grant` leaves: it may write these pages."""

    room: RoomId
    endpoint: str
    """Of the prefill worker that it is granted to."""
    generation: int
    pages: tuple[int, ...]


class DismissRoom(msgspec.Struct, frozen=True, tag=True):
    """On every rank: the room's lease is gone, it writes nothing any more."""

    room: RoomId


class Verdict(Enum):
    """On one piece of a write, and on the wire."""

    LANDED = 0
    NO_ROOM = 1
    """It is over, or never was."""
    OTHER_PAIRING = 2
    """The room was granted to another prefill worker, or on another generation."""
    OUTSIDE = 3
    """Not all of it lies in pages that the room may write."""


class Pairing(NamedTuple):
    """What a connection has proved to be of."""

    decode: int
    """Incarnation, as its peer said."""
    endpoint: str
    generation: int


class WritableRooms:
    """Written by the loop, asked by the threads that read from sockets."""

    def __init__(self, page_bytes: int) -> None:
        """`page_bytes`: of one page in this rank's pool."""
        self._page_bytes = page_bytes
        self._rooms: dict[int, AdmitRoom] = {}
        self._pages: dict[int, frozenset[int]] = {}
        # The highest serial that was told of. Serials count up, so what is missing below is over.
        self._newest = 0
        self._told = threading.Condition()

    def __len__(self) -> int:
        return len(self._rooms)

    def admitted(self) -> tuple[AdmitRoom, ...]:
        """All that may write now. Raises AssertionError where the state contradicts itself."""
        assert self._rooms.keys() == self._pages.keys()
        for serial, room in self._rooms.items():
            assert serial == room.room.serial <= self._newest, room.room
            assert self._pages[serial] == frozenset(room.pages), room.room
        return tuple(self._rooms.values())

    def admit(self, room: AdmitRoom) -> None:
        """Before anybody can know of the room."""
        serial = room.room.serial
        assert serial > self._newest, (serial, self._newest)
        with self._told:
            self._pages[serial] = frozenset(room.pages)
            self._rooms[serial] = room
            self._newest = serial
            self._told.notify_all()

    def dismiss(self, room: RoomId) -> None:
        """It has ended, and is never heard of again."""
        del self._rooms[room.serial]
        del self._pages[room.serial]

    def wake(self) -> None:
        """Whoever waits for a room is to look whether that is still of use."""
        with self._told:
            self._told.notify_all()

    def judge(
        self,
        serial: int,
        pairing: Pairing,
        ranges: Sequence[tuple[int, int]],
        is_over: Callable[[], bool],
    ) -> Verdict:
        """Whether room `serial` may write `ranges` (offset and length, bytes in the pool) through a
        connection of this pairing. Waits for a room that is not known yet, unless `is_over`."""
        if serial > self._newest:
            with self._told:
                self._told.wait_for(lambda: serial <= self._newest or is_over(), ROOM_SECONDS_MAX)
        room, pages = self._rooms.get(serial), self._pages.get(serial)
        if room is None or pages is None:
            return Verdict.NO_ROOM
        if Pairing(room.room.decode, room.endpoint, room.generation) != pairing:
            return Verdict.OTHER_PAIRING
        is_inside = all(self._is_inside(pages, offset, length) for offset, length in ranges)
        return Verdict.LANDED if is_inside else Verdict.OUTSIDE

    def _is_inside(self, pages: frozenset[int], offset: int, length: int) -> bool:
        first, last = offset // self._page_bytes, (offset + length - 1) // self._page_bytes
        # A range of more pages than there are cannot be inside, and is not gone through.
        return last - first < len(pages) and all(n in pages for n in range(first, last + 1))
