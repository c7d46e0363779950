"""What passes through the connections of the `tcp` engine. Little-endian, every size bounded.

sender    Greeting, once
receiver  Reply, once; the connection is closed after any other than ACCEPTED
sender    pieces: head, its ranges, its bytes
receiver  one Answer per piece, in their order; sent when a head asks for them
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from pdrt.transfer.writable import Verdict

MAGIC = b"pdrt-kv2"
"""Names the protocol and its version."""
TOKEN_BYTES = 16
PIECE_BYTES_MAX = 512 << 10
"""Also what a fence may have to wait for: one piece of each connection. Larger ones, sent in one
call, push out of the caches what the receiver is to read (measured: 2 MB, a quarter slower)."""
PIECE_RANGES_MAX = 512
"""Below IOV_MAX, so that a piece is read and sent by one call."""

_GREETING = struct.Struct("<8s16sQQQQ")
_REPLY = struct.Struct("<8sQ")
_HEAD = struct.Struct("<QIII")
_ANSWER = struct.Struct("<I")

GREETING_BYTES = _GREETING.size
REPLY_BYTES = _REPLY.size
HEAD_BYTES = _HEAD.size
ANSWER_BYTES = _ANSWER.size
RANGE_BYTES = 16
"""Offset and length, 64 bits each."""


class Malformed(Exception):
    """Bytes that are not of this protocol: their connection ends."""


class Greeting(NamedTuple):
    """Who wants to write, and where."""

    token: bytes
    segment: int
    """Serial of the segment at its receiver."""
    decode: int
    rank: int
    generation: int


class Greeted(Enum):
    """The receiver's reply."""

    ACCEPTED = 0
    WRONG_TOKEN = 1
    STALE = 2
    """That segment is not there, or not any more."""
    CROWDED = 3
    """It has as many connections as it may."""


class Head(NamedTuple):
    """Of one piece."""

    room: int
    """Serial; the decode incarnation is the connection's."""
    ranges: int
    length: int
    """Bytes, of all ranges together."""
    is_last: bool
    """Its answer, and those before it, are to be sent now."""


def pack_greeting(greeting: Greeting) -> bytes:
    return _GREETING.pack(MAGIC, *greeting)


def unpack_greeting(data: bytes | bytearray) -> Greeting:
    """Raises Malformed."""
    magic, *fields = _GREETING.unpack(data)
    if magic != MAGIC:
        raise Malformed(f"greeted with {magic!r}, not {MAGIC!r}")
    return Greeting(*fields)


def pack_reply(reply: Greeted) -> bytes:
    return _REPLY.pack(MAGIC, reply.value)


def unpack_reply(data: bytes | bytearray) -> Greeted:
    """Raises Malformed."""
    magic, value = _REPLY.unpack(data)
    if magic != MAGIC or value >= len(Greeted):
        raise Malformed(f"replied with {magic!r} {value}, not {MAGIC!r}")
    return Greeted(value)


def pack_head(room: int, ranges: Sequence[tuple[int, int]], *, is_last: bool) -> bytes:
    """Head and table of ranges: offset in the receiver's pool and length, bytes."""
    length = sum(size for _, size in ranges)
    flat = [number for pair in ranges for number in pair]
    return _HEAD.pack(room, len(ranges), length, is_last) + struct.pack(f"<{len(flat)}Q", *flat)


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Raises Malformed: out of bounds."""
    room, ranges, length, is_last = _HEAD.unpack(data)
    if not 0 < ranges <= PIECE_RANGES_MAX or not 0 < length <= PIECE_BYTES_MAX:
        raise Malformed(f"a piece of {ranges} ranges and {length} bytes")
    return Head(room, ranges, length, bool(is_last))


def unpack_ranges(head: Head, data: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
    """Raises Malformed: an empty one, or their sum is not the head's."""
    flat = struct.unpack(f"<{2 * head.ranges}Q", data)
    ranges = list(zip(flat[::2], flat[1::2], strict=True))
    if min(flat[1::2]) == 0 or sum(flat[1::2]) != head.length:
        raise Malformed(f"ranges that do not make up {head.length} bytes")
    return ranges


def pack_answers(verdicts: Sequence[Verdict]) -> bytes:
    return struct.pack(f"<{len(verdicts)}I", *(verdict.value for verdict in verdicts))


def unpack_answer(data: bytes | bytearray | memoryview) -> Verdict:
    """Raises Malformed."""
    (value,) = _ANSWER.unpack(data)
    if value >= len(Verdict):
        raise Malformed(f"answer {value}")
    return Verdict(value)
