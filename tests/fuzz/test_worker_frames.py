"""Frames to workers: whatever a gateway or a peer says, they go on, whole, and serve."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import msgspec
import pytest

from pdrt.decode.worker import DecodeWorker
from pdrt.ids import RequestId, RoomId
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.codec import BadFrame, Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    GatewayToWorker,
    Inspect,
    Registered,
    StepTokens,
    Submit,
    WorkerToGateway,
)
from pdrt.protocol.messages import (
    PROTOCOL_VERSION,
    DecodeToPrefill,
    Drained,
    FirstToken,
    FirstTokenData,
    Outcome,
    PrefillToDecode,
    Reason,
    Revoke,
    Welcome,
)
from pdrt.sampling import Sampling
from pdrt.transfer import worker_loop
from tests.decode.deployment import FRAME_BYTES, GatewayPeer, Pair, deployed
from tests.fuzz.effort import MORE
from tests.fuzz.hostile import mutated, scrambled
from tests.prefill.peer import Prefill

BATCH = 8
"""Frames between two looks at the worker."""
rounds = pytest.mark.parametrize(
    "rounds",
    [pytest.param(40, id="few"), pytest.param(40 * MORE, id="many", marks=pytest.mark.slow)],
)
SAMPLING = Sampling(
    max_tokens=4,
    temperature=0.5,
    top_p=0.9,
    logit_bias=((5, 1.0),),
    logprobs=2,
    stop_token_ids=(9,),
)


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "TICK_SECONDS", 0.01)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with deployed() as pair:
        yield pair


def tree(message: msgspec.Struct) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def frame(random: Random, message: msgspec.Struct) -> bytes:
    """Nearly that message."""
    if random.randrange(4) == 0:
        return scrambled(random, encode(message))
    return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(mutated(random, tree(message)))


@rounds
async def test_what_a_gateway_says(pair: Pair, rounds: int) -> None:
    """Requests that are nearly right end by themselves; the next one is served."""
    gateway, random = pair.gateway.incarnation, Random(rounds)
    # A cancel that comes before its request ends it: none is to name one of these by chance.
    pair.gateway._serial = 0x5EED << 24
    hear_of_own_requests_only(pair.gateway)
    for number in range(rounds):
        for worker in (pair.decode, pair.prefill):
            for each in range(BATCH):
                request = RequestId(gateway, 1_000_000 + BATCH * number + each, 1)
                said = random.choice(to_worker(worker, gateway, request))
                worker.links._receive(worker.links._links[0], frame(random, said))
            worker.check()
        for name in list(pair.decode.scheduler.requests):
            pair.gateway.send(
                pair.decode.incarnation,
                encode(Cancel(name, pair.decode.incarnation, "the round is over")),
            )
        await pair.deployment.paired()
        pair.decode.check()
        if number % 4 == 0:
            await pair.serves()
    await pair.serves()


def hear_of_own_requests_only(gateway: GatewayPeer) -> None:
    """It has asked for nothing of what is answered here."""
    decoder: Decoder[Any] = Decoder(WorkerToGateway, FRAME_BYTES)
    hear = gateway.channel._on_frame

    def on_frame(peer: bytes, frame: bytes) -> None:
        message = decoder.decode(frame)
        said = message.tokens if isinstance(message, StepTokens) else (message,)
        asked = [getattr(each, "request", None) for each in said]
        if all(request is None or request in gateway.streams for request in asked):
            hear(peer, frame)

    gateway.channel._on_frame = on_frame


def to_worker(
    worker: DecodeWorker | PrefillWorker, gateway: Any, request: RequestId
) -> list[msgspec.Struct]:
    me = worker.incarnation
    return [
        Submit(request, me, (5, 6, 7), (8,), SAMPLING, 60.0, ("tcp://127.0.0.1:1",)),
        Submit(request, me, (5, 6, 7), (), SAMPLING, 60.0, ()),
        Cancel(request, me, "gone"),
        Credit(request, me, 3),
        Inspect(me, 1, gateway, True),
        Registered(gateway, me, 1, ("tcp://127.0.0.1:1",)),
    ]


@rounds
async def test_what_a_decode_worker_says(rounds: int) -> None:
    """One whose lines are nearly right harms no other one."""
    prefill, random = Prefill(), Random(rounds)
    good = prefill.peer()
    assert (await good.hello()).refusal is None
    for number in range(1, rounds + 1):
        bad = prefill.peer(0xB0000 + number)
        await bad.hello()
        for serial in range(1, BATCH + 1):
            grant = bad.make_grant(serial, random.choice([1, 5, 20, 40]))
            room = RoomId(bad.incarnation, random.randint(1, BATCH))
            revoke = Revoke(room, bad.writer, grant.seq + 1, 1, Reason.CLIENT_GONE)
            said = random.choice([grant, grant, revoke])
            prefill.worker.handover._receive(b"", frame(random, said))
        prefill.worker.check()
        bad.close()
        prefill.peers.remove(bad)
        if number % 4 == 0:
            grant = good.make_grant(number, 20)
            await good.say(grant)
            assert (await good.drained(number)).outcome is Outcome.COMPLETE
            good.landed(grant)
    for room in list(prefill.worker.table.rooms):
        prefill.worker.handover.apply(prefill.worker.table.end_room(room, Reason.SHUTDOWN))
    await prefill.deployment.quiet()
    await prefill.deployment.close()
    good.close()


@rounds
async def test_what_a_prefill_worker_says(pair: Pair, rounds: int) -> None:
    """In the name of the one that serves: rooms may fail by it, which is what it said."""
    random = Random(rounds)
    ((endpoint, channel),) = pair.decode.handover._channels.items()
    for _ in range(rounds):
        peer = pair.decode.table.pairing.peers[endpoint]
        for _ in range(BATCH):
            said = random.choice(to_decode(pair.decode, peer))
            channel._on_frame(frame(random, said))
        pair.decode.check()
    # Its next true word makes good what was said in its name.
    await pair.deployment.paired()
    await pair.serves()


def to_decode(decode: DecodeWorker, peer: Any) -> list[msgspec.Struct]:
    writer, room = peer.writer, RoomId(decode.incarnation, 1)
    first = FirstTokenData(5, 3)
    return [
        Welcome(
            decode.incarnation, peer.last_seq + 1, 1, 1, writer, (), decode.fingerprint, ("local",)
        ),
        FirstToken(room, writer, first),
        Drained(room, writer, Outcome.COMPLETE, None, first=first),
        Drained(room, writer, Outcome.ENDED, Reason.WRITE_FAILED, detail="d"),
    ]


@rounds
async def test_a_malformed_frame_is_counted_and_nothing_else_happens(
    pair: Pair, rounds: int
) -> None:
    random = Random(rounds)
    decode, prefill = pair.decode, pair.prefill
    (channel,) = decode.handover._channels.values()
    receivers: list[tuple[Any, Callable[[bytes], None]]] = [
        (decode.links.rejected, lambda f: decode.links._receive(decode.links._links[0], f)),
        (prefill.links.rejected, lambda f: prefill.links._receive(prefill.links._links[0], f)),
        (prefill.handover.rejected, lambda f: prefill.handover._receive(b"", f)),
        (decode.handover.rejected, channel._on_frame),
    ]
    whole = encode(Inspect(decode.incarnation, 1, pair.gateway.incarnation))
    for _ in range(BATCH * rounds):
        rejected, receive = random.choice(receivers)
        noise = scrambled(random, whole)
        if is_message(noise):
            continue
        before, count = state(pair), rejected.total()
        receive(noise)
        assert rejected.total() == count + 1
        assert state(pair) == before
    await pair.serves()


def is_message(frame: bytes) -> bool:
    """What is changed may be another message as well, of any direction."""
    unions = (GatewayToWorker, WorkerToGateway, DecodeToPrefill, PrefillToDecode)
    for union in unions:
        with contextlib.suppress(BadFrame):
            Decoder(union, FRAME_BYTES).decode(frame)
            return True
    return False


def state(pair: Pair) -> Any:
    """All that a frame could change."""
    decode, prefill = pair.decode, pair.prefill
    return (
        list(decode.scheduler.requests),
        list(decode.table.leases),
        list(prefill.table.rooms),
        {i: p.last_seq for i, p in prefill.table.peers.known.items()},
        {e: p.last_seq for e, p in decode.table.pairing.peers.items()},
        decode.pages.counts(),
        prefill.pages.counts(),
        dict(decode.table.stale),
        dict(prefill.table.stale),
        dict(decode.links.stale),
        dict(prefill.links.stale),
    )
