"""What two workers must have in common: whatever differs is refused by both sides with both values,
nothing is opened, granted or remembered, and nobody waits for anything."""

from __future__ import annotations

import msgspec
import pytest

from pdrt.protocol.effects import OpenEngine, OpenFence
from pdrt.protocol.messages import PROTOCOL_VERSION, Fingerprint
from pdrt.protocol.writers import PairState
from tests.protocol.traces import ENDPOINT, FINGERPRINT, LAYOUT, Decode, Prefill, one, only, sent


def of_layout(**changes: object) -> Fingerprint:
    layout = msgspec.structs.replace(LAYOUT, **changes)
    return msgspec.structs.replace(FINGERPRINT, layout=layout)


def of_model(**changes: object) -> Fingerprint:
    return msgspec.structs.replace(FINGERPRINT, **changes)


OTHERS = [
    (of_layout(page_size=LAYOUT.page_size + 8), "page_size", 16, 24),
    (of_layout(dtype="float32"), "dtype", "bfloat16", "float32"),
    (of_layout(kv_heads=LAYOUT.kv_heads * 2), "kv_heads", LAYOUT.kv_heads, LAYOUT.kv_heads * 2),
    (of_layout(layers=LAYOUT.layers + 1), "layers", LAYOUT.layers, LAYOUT.layers + 1),
    (of_layout(head_dim=64), "head_dim", LAYOUT.head_dim, 64),
    (of_model(model="another"), "model", FINGERPRINT.model, "another"),
    (of_model(digest="f00"), "model digest", FINGERPRINT.digest, "f00"),
    (
        of_model(protocol_version=PROTOCOL_VERSION + 1),
        "protocol_version",
        PROTOCOL_VERSION,
        PROTOCOL_VERSION + 1,
    ),
    (of_model(kv_checksum=True), "kv_checksum", False, True),
]


def test_every_field_is_gone_through() -> None:
    """A new one that nobody compares would pair workers that do not understand each other."""
    fields = {*Fingerprint.__struct_fields__, *type(LAYOUT).__struct_fields__}
    named = {"digest" if name == "model digest" else name for _, name, _, _ in OTHERS}
    assert named == fields - {"layout"}


@pytest.mark.parametrize(("other", "name", "ours", "theirs"), OTHERS)
def test_prefill_refuses_and_remembers_nothing(
    other: Fingerprint, name: str, ours: object, theirs: object
) -> None:
    prefill = Prefill()
    effects = prefill.hello(fingerprint=other)
    assert not only(effects, OpenEngine)
    welcome = one(sent(effects))
    assert welcome.refusal == f"prefill and decode differ: {name}: {ours} != {theirs}"
    assert welcome.generation == 0
    assert prefill.table.peers.known == {}


@pytest.mark.parametrize(("other", "name", "ours", "theirs"), OTHERS)
def test_decode_refuses_and_takes_no_fence(
    other: Fingerprint, name: str, ours: object, theirs: object
) -> None:
    decode = Decode()
    decode.want()
    decode.open_segments()
    assert not only(decode.welcome(fingerprint=other), OpenFence)
    peer = decode.pairing.peers[ENDPOINT]
    assert peer.refusal == f"{name}: {ours} != {theirs}"
    assert peer.state is PairState.REFUSED
    assert decode.table.usable_endpoints() == []
    decode.table.check()
