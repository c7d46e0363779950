"""Grants and submits for traces of the schedulers."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.ids import Incarnation, RequestId, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.protocol.gateway_messages import Submit
from pdrt.protocol.messages import Grant
from pdrt.sampling import Sampling

DECODE = Incarnation(0xD0)
GATEWAY = Incarnation(0xE0)
LAYOUT = KvLayout(page_size=4, kv_heads=1, layers=1, head_dim=2, dtype="float32")


def room(serial: int) -> RoomId:
    return RoomId(DECODE, serial)


def grant(serial: int, length: int) -> Grant:
    return Grant(
        room=room(serial),
        writer=Incarnation(0xA0),
        seq=serial,
        generation=1,
        pages=tuple(range(LAYOUT.pages_for(length))),
        first_page=0,
        token_ids=tuple(range(length)),
        output_tokens=0,
        sampling=Sampling(max_tokens=4),
        seconds_max=60.0,
    )


def prompt(serial: int, length: int) -> tuple[int, ...]:
    """One of a family: a longer one goes on where a shorter one of the same `serial` ends."""
    return tuple(range(100 * serial, 100 * serial + length))


def submit(
    serial: int,
    length: int = 5,
    output: Sequence[int] = (),
    sampling: Sampling | None = None,
    seconds_max: float = 60.0,
) -> Submit:
    """A prompt that begins as no other's does."""
    return Submit(
        request=RequestId(GATEWAY, serial, 1),
        worker=DECODE,
        token_ids=prompt(serial, length),
        output_token_ids=tuple(output),
        sampling=sampling or Sampling(max_tokens=20),
        seconds_max=seconds_max,
        prefill_endpoints=(),
    )
