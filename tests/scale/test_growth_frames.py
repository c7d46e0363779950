"""Frames about rooms that nobody knows, or from lives that are over, a million times: each is
counted, changes nothing and leaves nothing. Decoded and received as from the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.codec import encode
from pdrt.protocol.messages import (
    DecodeToPrefill,
    Drained,
    Fingerprint,
    FirstToken,
    Grant,
    Hello,
    Outcome,
    PrefillToDecode,
    RankProcess,
    Reason,
    Revoke,
    Welcome,
)
from pdrt.sampling import Sampling
from pdrt.transfer.frames import FrameReader
from tests.protocol.traces import DECODE, ENDPOINT, FINGERPRINT, FIRST, WRITER, request, segment
from tests.scale.growth import BLOCKS_MAX, left_by
from tests.scale.handover import Handover

FRAME_BYTES_MAX = 1 << 16
OTHER_MODEL = Fingerprint(model="m", digest="other", layout=FINGERPRINT.layout)


def stranger(number: int) -> Incarnation:
    """A life of its own for each."""
    return Incarnation((1 << 40) + number)


def said_to_decode(number: int, room: RoomId) -> msgspec.Struct:
    """`room` is the only one that lives."""
    match number % 5:
        case 0:
            return FirstToken(RoomId(DECODE, (1 << 40) + number), WRITER, FIRST)
        case 1:
            return Drained(RoomId(stranger(number), 1), WRITER, Outcome.COMPLETE)
        case 2:
            return Drained(room, stranger(number), Outcome.UNSETTLED, detail=f"frame {number}")
        case 3:
            return welcome(decode=stranger(number), seq=number + 1)
        case _:
            # Answers a `Hello` that was never sent.
            return welcome(writer=stranger(number), seq=(1 << 40) + number)


def welcome(**changes: Any) -> Welcome:
    fields: dict[str, Any] = {
        "decode": DECODE,
        "generation": 1,
        "floor": 1,
        "writer": WRITER,
        "ranks": (RankProcess(11, 22, 33),),
        "fingerprint": FINGERPRINT,
        "engines": ("test",),
        "engine": "test",
        "rooms": (),
    }
    return Welcome(**(fields | changes))


def said_to_prefill(number: int, seq: int) -> msgspec.Struct:
    """`seq`: of the one decode worker that is known, not used yet."""
    match number % 5:
        case 0:
            return grant(RoomId(stranger(number), 1), WRITER, number + 1)
        case 1:
            return grant(RoomId(DECODE, (1 << 40) + number), stranger(number), seq)
        case 2:
            return Revoke(RoomId(DECODE, (1 << 40) + number), WRITER, seq, 1, Reason.CLIENT_GONE)
        case 3:
            return Revoke(RoomId(DECODE, (1 << 40) + number), WRITER, 1, 1, Reason.CLIENT_GONE)
        case _:
            return hello(stranger(number), number + 1, OTHER_MODEL)


def grant(room: RoomId, writer: Incarnation, seq: int) -> Grant:
    return Grant(
        room=room,
        writer=writer,
        seq=seq,
        generation=1,
        pages=(1, 2),
        first_page=0,
        token_ids=(5, 6, 7),
        output_tokens=0,
        sampling=Sampling(max_tokens=4),
        seconds_max=60.0,
    )


def hello(decode: Incarnation, seq: int, fingerprint: Fingerprint = FINGERPRINT) -> Hello:
    return Hello(
        decode=decode,
        seq=seq,
        fingerprint=fingerprint,
        generation=1,
        segments=(segment(0, 1),),
        floor=1,
    )


def test_frames_to_a_decode_worker(times: int) -> None:
    handover = Handover()
    table = handover.leases
    reader: FrameReader[PrefillToDecode] = FrameReader(PrefillToDecode, FRAME_BYTES_MAX, "peer")
    room = table.next_room()
    table.grant(ENDPOINT, request((1, 2, 3)), handover.now)

    def work(numbers: range) -> None:
        for number in numbers:
            message = reader.read(encode(said_to_decode(number, room)))
            assert message is not None
            assert table.receive(ENDPOINT, message, handover.now) == []

    assert left_by(work, times) < BLOCKS_MAX
    assert table.stale.total() == times + times // 10
    assert set(table.stale) == {
        "unknown_room", "other_writer", "other_incarnation", "other_endpoint",
    }  # fmt: skip
    assert list(table.leases) == [room]
    (peer,) = table.pairing.peers.values()
    assert (peer.writer, list(peer.fences)) == (WRITER, [WRITER])
    table.check()


def test_frames_to_a_prefill_worker(times: int) -> None:
    handover = Handover()
    table = handover.rooms
    reader: FrameReader[DecodeToPrefill] = FrameReader(DecodeToPrefill, FRAME_BYTES_MAX, "peer")
    answers = 0

    def work(numbers: range) -> None:
        nonlocal answers
        for number in numbers:
            seq = handover.leases.pairing.next_seq()
            message = reader.read(encode(said_to_prefill(number, seq)))
            assert message is not None
            answers += len(table.receive(message, handover.now))

    assert left_by(work, times) < BLOCKS_MAX
    done = times + times // 10
    # A `Revoke` of an unknown room and a `Hello` of another model have one answer each.
    assert answers == 2 * done // 5
    assert table.stale.total() == done - answers
    assert set(table.stale) == {"other_incarnation", "old_seq"}
    assert list(table.peers.known) == [DECODE]
    assert table.rooms == {}
    table.check()


def test_decode_workers_that_say_hello_once(times: int) -> None:
    """Each is remembered for its `seq`; the table is full in the end, and says so."""
    config = msgspec.structs.replace(ProtocolConfig(), decode_incarnations_max=1000)
    handover = Handover(config)
    table = handover.rooms
    reader: FrameReader[DecodeToPrefill] = FrameReader(DecodeToPrefill, FRAME_BYTES_MAX, "peer")

    def work(numbers: range) -> None:
        for number in numbers:
            message = reader.read(encode(hello(stranger(number), 1)))
            assert message is not None
            effects = table.receive(message, handover.now)
            assert len(effects) == 1, "it is answered, or reached for"

    assert left_by(work, times) < BLOCKS_MAX
    assert len(table.peers.known) == config.decode_incarnations_max
    assert table.peers.is_full, "the worker drains and exits; its successor starts empty"
    table.check()


def test_frames_that_are_no_messages(times: int) -> None:
    reader: FrameReader[PrefillToDecode] = FrameReader(PrefillToDecode, FRAME_BYTES_MAX, "peer")
    whole = encode(said_to_decode(0, RoomId(DECODE, 1)))
    shapes = (b"", b"\x07", whole[:-1], b"\xff" + whole[1:], whole[:1] + b"%d", whole + b"%d")

    def work(numbers: range) -> None:
        for number in numbers:
            shape = shapes[number % len(shapes)]
            assert reader.read(shape.replace(b"%d", b"%d" % number)) is None

    assert left_by(work, times) < BLOCKS_MAX
    assert set(reader.rejected) <= {"size", "version", "content"}
    assert reader.rejected.total() == times + times // 10
