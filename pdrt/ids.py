"""Names of lives and things: incarnations, rooms, requests. Pure values, never reused."""

from __future__ import annotations

import secrets
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

# A frame that names another number does not decode: every incarnation has a routing id.
Incarnation = NewType("Incarnation", Annotated[int, Meta(ge=1)])
"""One life of one worker or gateway: 64 random bits from the OS, drawn by its leader at start."""

INCARNATION_BYTES = 8


def new_incarnation() -> Incarnation:
    """Draw an incarnation; never 0, so that 0 cannot pass for one in a default field."""
    while not (bits := secrets.randbits(INCARNATION_BYTES * 8)):
        pass
    return Incarnation(bits)


def routing_id(incarnation: Incarnation) -> bytes:
    """The ZeroMQ routing id of an incarnation: a marker (0 is reserved there) and 8 bytes."""
    return b"w" + incarnation.to_bytes(INCARNATION_BYTES, "big")


def short(incarnation: Incarnation) -> str:
    """16 hex digits, as logs, metrics and `pdrt status` show an incarnation."""
    return f"{incarnation:016x}"


class RoomId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """One request's hand-over. Serials count up within a decode incarnation: never reused."""

    decode: Incarnation
    serial: int

    def __str__(self) -> str:
        return f"{short(self.decode)}/{self.serial}"


class RequestId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """One attempt at a client's request, named by the gateway incarnation that accepted it."""

    gateway: Incarnation
    serial: int
    attempt: int

    def __str__(self) -> str:
        return f"{short(self.gateway)}/{self.serial}.{self.attempt}"
