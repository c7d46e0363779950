"""Frames: every message survives the wire; whatever else arrives is a `BadFrame`, no more."""

from __future__ import annotations

import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from pdrt.ids import RoomId, routing_id
from pdrt.protocol import gateway_messages, messages
from pdrt.protocol.codec import BadFrame, Decoder, encode
from pdrt.protocol.gateway_messages import GatewayToWorker, WorkerToGateway
from pdrt.protocol.messages import (
    PROTOCOL_VERSION,
    DecodeToPrefill,
    Drained,
    Outcome,
    PrefillToDecode,
)
from tests.protocol.traces import DECODE, WRITER, Prefill

UNIONS = {
    "DecodeToPrefill": DecodeToPrefill,
    "PrefillToDecode": PrefillToDecode,
    "WorkerToGateway": WorkerToGateway,
    "GatewayToWorker": GatewayToWorker,
}
MESSAGES = [(union, kind) for union in UNIONS.values() for kind in get_args(union)]
FRAME_BYTES_MAX = 4096
DRAINED = Drained(RoomId(DECODE, 3), WRITER, Outcome.ENDED, messages.Reason.DEADLINE)


def values(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    match info:
        case inspect.IntType(ge=least, le=most):
            first, last = -(2**63) if least is None else least, 2**64 - 1 if most is None else most
            return st.integers(first, last)
        case inspect.FloatType(ge=least, gt=above, le=most):
            first = above if least is None else least
            return st.floats(first, most, exclude_min=above is not None, allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType(cls):
            return st.sampled_from(cls)
        case inspect.VarTupleType(item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.TupleType(items):
            return st.tuples(*[values(x) for x in items])
        case inspect.DictType(key, value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.UnionType(types):
            return st.one_of([values(x) for x in types])
        case inspect.StructType(cls, fields):
            return st.builds(cls, **{x.name: values(x.type) for x in fields})
    raise AssertionError(f"a message must not carry {info}")


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(kind))


any_message = st.sampled_from(MESSAGES).flatmap(lambda x: st.tuples(st.just(x[0]), any_of(x[1])))


def decoder(union: Any, frame_bytes_max: int = FRAME_BYTES_MAX) -> Decoder[Any]:
    return Decoder(union, frame_bytes_max)


def refused(frame: bytes, union: Any = PrefillToDecode) -> str:
    with pytest.raises(BadFrame) as caught:
        decoder(union).decode(frame)
    return caught.value.reason


@pytest.mark.parametrize(("union", "kind"), MESSAGES, ids=lambda x: getattr(x, "__name__", ""))
def test_every_message_survives_the_wire(union: Any, kind: Any) -> None:
    @given(any_of(kind))
    def survives(message: Any) -> None:
        assert decoder(union).decode(encode(message)) == message

    survives()


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS.keys())
def test_a_message_of_another_direction_is_refused(union: Any) -> None:
    @given(any_message)
    def refuses(drawn: tuple[Any, Any]) -> None:
        other, message = drawn
        if other is not union:
            assert refused(encode(message), union) == "content"

    refuses()


@given(st.sampled_from(list(UNIONS.values())), st.binary(max_size=64))
def test_random_bytes_are_refused(union: Any, noise: bytes) -> None:
    for frame in (noise, bytes([PROTOCOL_VERSION]) + noise):
        assert refused(frame, union) in {"version", "content"}


@given(any_message, st.data())
def test_truncations_are_refused(drawn: tuple[Any, Any], data: st.DataObject) -> None:
    union, message = drawn
    frame = encode(message)
    end = data.draw(st.integers(0, len(frame) - 1))
    assert refused(frame[:end], union) in {"version", "content"}


@given(any_message, st.binary(min_size=1, max_size=16))
def test_trailing_bytes_are_refused(drawn: tuple[Any, Any], tail: bytes) -> None:
    union, message = drawn
    assert refused(encode(message) + tail, union) == "content"


@given(any_message, st.data())
def test_flipped_bits_yield_a_message_of_the_union_or_a_bad_frame(
    drawn: tuple[Any, Any], data: st.DataObject
) -> None:
    union, message = drawn
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(1, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = decoder(union).decode(bytes(frame))
    except BadFrame as error:
        assert error.reason == "content"
    else:
        assert isinstance(decoded, get_args(union))


def test_other_versions_are_refused_whatever_follows() -> None:
    frame = encode(DRAINED)
    assert frame[0] == PROTOCOL_VERSION
    for version in set(range(256)) - {PROTOCOL_VERSION}:
        assert refused(bytes([version]) + frame[1:]) == "version"
    assert refused(b"") == "version"


def test_frame_over_the_bound_is_refused_unread() -> None:
    frame = encode(DRAINED)
    exact = decoder(PrefillToDecode, len(frame))
    assert exact.decode(frame) == DRAINED
    with pytest.raises(BadFrame, match=f"{len(frame)} bytes, {len(frame) - 1} allowed") as caught:
        decoder(PrefillToDecode, len(frame) - 1).decode(frame)
    assert caught.value.reason == "size"


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 4000,
        b"\x81\xa1a" * 1300,
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        struct.pack(">BBBd", 0x81, 0xA1, 0x61, float("nan")),
        b"\x81\xa4type\xa7Drained",
        b"\x82\xa4type\xa7Drained\xa4room\xff",
    ],
    ids=["deep array", "deep map", "never used", "huge map", "huge bytes", "nan", "short", "types"],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    for union in UNIONS.values():
        assert refused(bytes([PROTOCOL_VERSION]) + body, union) == "content"


def test_deep_nesting_in_a_field_that_nobody_knows_is_refused_or_skipped() -> None:
    known = msgspec.msgpack.encode(msgspec.to_builtins(DRAINED))
    deep = bytes([known[0] + 1]) + known[1:] + b"\xa1z" + b"\x91" * 3000 + b"\xc0"
    assert refused(bytes([PROTOCOL_VERSION]) + deep) == "content"


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "fine"},
        {"outcome": 1},
        {"room": [1]},
        {"room": [1, "many"]},
        {"room": [0, 1]},
        {"room": [-1, 1]},
        {"writer": 0},
        {"writer": "1"},
        {"writer": 1.5},
        {"retryable": 1},
        {"detail": None},
    ],
    ids=str,
)
def test_wrong_values_are_refused(change: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(msgspec.to_builtins(DRAINED) | change)
    assert refused(bytes([PROTOCOL_VERSION]) + body) == "content"


@pytest.mark.parametrize("field", ["pages", "token_ids", "first_page", "output_tokens"])
def test_negative_pages_and_tokens_are_refused(field: str) -> None:
    fields = msgspec.to_builtins(Prefill().make_grant())
    fields[field] = [1, -1] if isinstance(fields[field], list | tuple) else -1
    body = msgspec.msgpack.encode(fields)
    assert refused(bytes([PROTOCOL_VERSION]) + body, DecodeToPrefill) == "content"


@given(any_message)
def test_every_incarnation_that_decodes_has_a_routing_id(drawn: tuple[Any, Any]) -> None:
    union, message = drawn
    decoded = decoder(union).decode(encode(message))
    for name in ("decode", "writer", "worker", "gateway"):
        if (incarnation := getattr(decoded, name, None)) is not None:
            assert len(routing_id(incarnation)) == 9


def test_messages_are_frozen_tagged_and_distinct() -> None:
    for union, kind in MESSAGES:
        assert kind.__struct_config__.frozen, kind
        assert kind.__struct_config__.tag == kind.__name__, (union, kind)
    assert len({kind for _, kind in MESSAGES}) == len(MESSAGES)


def test_every_message_between_workers_names_both_incarnations() -> None:
    for kind in (*get_args(PrefillToDecode), messages.Grant, messages.Revoke):
        fields = set(kind.__struct_fields__)
        assert "writer" in fields, kind
        assert fields & {"room", "decode"}, kind
    assert "decode" in messages.Hello.__struct_fields__
    for kind in get_args(GatewayToWorker):
        assert "worker" in kind.__struct_fields__, kind
    for kind in get_args(WorkerToGateway):
        assert "worker" in kind.__struct_fields__, kind


def test_every_struct_with_a_tag_is_in_a_union() -> None:
    tagged = {
        kind
        for module in (messages, gateway_messages)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__struct_config__.tag is not None
    }
    assert tagged == {kind for _, kind in MESSAGES}
