"""A worker and its gateways: who listens, who is gone, and what is not theirs to ask."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from pdrt.errors import ConfigError
from pdrt.ids import Incarnation, RequestId, routing_id
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Finished,
    FinishReason,
    GatewayToWorker,
    Inspect,
    Register,
    Registered,
    Report,
    Role,
    StepTokens,
    Tokens,
    WorkerToGateway,
)
from pdrt.protocol.messages import PROTOCOL_VERSION
from pdrt.transfer import gateway_link
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.gateway_link import TOKENS_PER_FRAME_MAX, GatewayLinks, Request
from tests.decode.deployment import PROTOCOL, until
from tests.protocol.traces import FINGERPRINT

WORKER = Incarnation(0xD0)
FRAME_BYTES = 1 << 20


class Gateway:
    """A gateway that answers when it is told to."""

    def __init__(self, incarnation: int = 0xE0, port: int = 0) -> None:
        self.incarnation = Incarnation(incarnation)
        self.heard: list[WorkerToGateway] = []
        self.answers = True
        self.prefills: tuple[str, ...] = ()
        self.refusal: str | None = None
        self._decoder: Decoder[WorkerToGateway] = Decoder(WorkerToGateway, FRAME_BYTES)
        self.channel = RouterChannel("127.0.0.1", port, self._hear, FRAME_BYTES)
        self.address = f"127.0.0.1:{self.channel.port}"

    def _hear(self, peer: bytes, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        assert peer == routing_id(WORKER)
        self.heard.append(message)
        if isinstance(message, Register) and self.answers:
            self.answer(message.seq)

    def answer(self, seq: int, incarnation: Incarnation | None = None) -> None:
        self.say(
            Registered(
                gateway=incarnation or self.incarnation,
                worker=WORKER,
                seq=seq,
                prefill_endpoints=self.prefills,
                refusal=self.refusal,
            )
        )

    def say(self, message: GatewayToWorker) -> None:
        self.channel.send(routing_id(WORKER), encode(message))

    @property
    def seqs(self) -> list[int]:
        return [m.seq for m in self.heard if isinstance(m, Register)]

    def asks(self, serial: int = 1) -> RequestId:
        return RequestId(self.incarnation, serial, 1)


class Worker:
    """Links on a clock of their own, ticking while something is waited for."""

    def __init__(self, *gateways: Gateway, **changes: float) -> None:
        self.now = time.monotonic()
        config = msgspec.structs.replace(PROTOCOL, **changes)
        addresses = tuple(gateway.address for gateway in gateways)
        self.links = GatewayLinks(addresses, WORKER, config, self.register)
        self.requests: list[Request] = []
        self.lost: list[Incarnation] = []
        self.links.on_request = self.requests.append
        self.links.on_gateway_lost = self.lost.append

    @staticmethod
    def register(seq: int) -> Register:
        return Register(
            role=Role.DECODE,
            worker=WORKER,
            seq=seq,
            endpoint=None,
            fingerprint=FINGERPRINT,
            max_model_len=100,
            requests_max=10,
            version="test",
        )

    def tick(self) -> bool:
        self.links.drain()
        self.links.handle_timer(time.monotonic())
        return True

    async def registered(self, *gateways: Gateway) -> None:
        wanted = {f"{gateway.incarnation:016x}" for gateway in gateways}
        await until(
            lambda: self.tick() and wanted <= {x["gateway"] for x in self.links.gateways()},
            "registration",
        )


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.channel.close()


@pytest.fixture
async def worker(gateway: Gateway) -> AsyncIterator[Worker]:
    worker = Worker(gateway)
    await worker.registered(gateway)
    yield worker
    worker.links.close()


async def test_registers_and_hears_of_prefill_workers(gateway: Gateway) -> None:
    gateway.prefills = ("tcp://a:1", "tcp://b:1")
    worker = Worker(gateway)
    changes: list[set[str]] = []
    worker.links.on_endpoints = lambda: changes.append(worker.links.prefill_endpoints)
    await worker.registered(gateway)
    assert changes[0] == {"tcp://a:1", "tcp://b:1"}
    worker.links.close()


async def test_heartbeats_have_growing_seqs(gateway: Gateway, worker: Worker) -> None:
    await until(lambda: worker.tick() and len(gateway.seqs) >= 5, "heartbeats")
    assert gateway.seqs == sorted(set(gateway.seqs))


class Shown:
    def render(self) -> bytes:
        return b"metrics"

    def status(self) -> bytes:
        return b"{}"


async def test_a_broken_invariant_is_reported_only_when_asked_for(
    gateway: Gateway, worker: Worker
) -> None:
    def check() -> None:
        raise AssertionError("a page has two owners")

    for serial, wanted in ((1, False), (2, True)):
        inspect = Inspect(WORKER, serial, gateway.incarnation, wanted)
        worker.links.answer(inspect, Shown(), check)
    await until(lambda: sum(isinstance(m, Report) for m in gateway.heard) == 2, "both reports")
    silent, told = (m for m in gateway.heard if isinstance(m, Report))
    assert silent.broken == () and silent.metrics == b"metrics"
    assert told.broken == ("AssertionError: a page has two owners",)


async def test_what_is_asked_and_answered(gateway: Gateway, worker: Worker) -> None:
    asked: list[Request] = [
        Cancel(gateway.asks(), WORKER, "gone"),
        Credit(gateway.asks(), WORKER, 5),
        Inspect(WORKER, 1, gateway.incarnation),
    ]
    for message in asked:
        gateway.say(message)
    await until(lambda: len(worker.requests) == 3, "all of it")
    assert worker.requests == asked
    assert worker.links.send(Tokens(gateway.asks(), WORKER, 0, (7,)))
    assert worker.links.send(Finished(gateway.asks(), WORKER, FinishReason.STOP))
    worker.links.answer(asked[-1], Shown(), lambda: None)  # type: ignore[arg-type]
    await until(
        lambda: (
            [type(m) for m in gateway.heard if not isinstance(m, Register)]
            == [Tokens, Finished, Report]
        ),
        "the answers, in order",
    )


async def test_another_gateways_requests_are_dropped_and_counted(
    gateway: Gateway, worker: Worker
) -> None:
    other = Incarnation(0xE7)
    gateway.say(Cancel(RequestId(other, 1, 1), WORKER, "gone"))
    gateway.say(Inspect(WORKER, 1, other))
    gateway.say(Cancel(gateway.asks(), Incarnation(0xD7), "gone"))
    gateway.say(Cancel(gateway.asks(2), WORKER, "gone"))
    await until(lambda: worker.requests, "the one that is ours")
    assert worker.requests == [Cancel(gateway.asks(2), WORKER, "gone")]
    assert worker.links.stale == {"other_gateway": 2, "other_incarnation": 1}
    assert not worker.links.send(Tokens(RequestId(other, 1, 1), WORKER, 0, (7,)))


async def test_nobody_asks_before_it_is_known(gateway: Gateway) -> None:
    gateway.answers = False
    worker = Worker(gateway)
    await until(lambda: worker.tick() and gateway.seqs, "a Register")
    gateway.say(Cancel(gateway.asks(), WORKER, "gone"))
    await until(lambda: worker.links.stale, "the request")
    assert worker.requests == []
    assert not worker.links.send(Finished(gateway.asks(), WORKER, FinishReason.STOP))
    worker.links.close()


async def test_malformed_frames_are_counted(gateway: Gateway, worker: Worker) -> None:
    for frame in (b"", b"\x09", bytes([PROTOCOL_VERSION]) + b"nonsense"):
        gateway.channel.send(routing_id(WORKER), frame)
    gateway.say(Cancel(gateway.asks(), WORKER, "gone"))
    await until(lambda: worker.requests, "what comes after them")
    assert worker.links.rejected == {"version": 2, "content": 1}


async def test_restarted_gateway_makes_the_old_one_lost(gateway: Gateway, worker: Worker) -> None:
    old, gateway.incarnation = gateway.incarnation, Incarnation(0xE1)
    await worker.registered(gateway)
    assert worker.lost == [old]
    assert not worker.links.send(Tokens(RequestId(old, 1, 1), WORKER, 0, (7,)))
    # The old one's answer to a Register of before comes late.
    gateway.answer(gateway.seqs[0], old)
    gateway.say(Cancel(gateway.asks(), WORKER, "gone"))
    await until(lambda: worker.requests, "what comes after it")
    assert worker.lost == [old]
    await worker.registered(gateway)


async def test_silent_gateway_is_lost_and_found_again(gateway: Gateway) -> None:
    worker = Worker(gateway, silence_seconds=0.3, tick_late_seconds=0.1)
    await worker.registered(gateway)
    gateway.answers = False
    await until(lambda: worker.tick() and worker.lost, "its loss")
    assert worker.lost == [gateway.incarnation]
    gateway.answers = True
    await worker.registered(gateway)
    assert worker.lost == [gateway.incarnation], "it is lost once"
    worker.links.close()


async def test_one_of_two_gateways_is_lost() -> None:
    gateways = Gateway(0xE0), Gateway(0xE1)
    gateways[0].prefills, gateways[1].prefills = ("tcp://a:1",), ("tcp://b:1",)
    worker = Worker(*gateways, silence_seconds=0.3, tick_late_seconds=0.1)
    await worker.registered(*gateways)
    assert worker.links.prefill_endpoints == {"tcp://a:1", "tcp://b:1"}
    gateways[0].answers = False
    await until(lambda: worker.tick() and worker.lost, "its loss")
    assert worker.lost == [gateways[0].incarnation]
    assert worker.links.send(Tokens(gateways[1].asks(), WORKER, 0, (7,)))
    assert not worker.links.send(Tokens(gateways[0].asks(), WORKER, 0, (7,)))
    worker.links.close()
    for gateway in gateways:
        gateway.channel.close()


async def test_the_tokens_of_a_step_go_in_one_frame_to_each_gateway() -> None:
    gateways = Gateway(0xE0), Gateway(0xE1)
    worker = Worker(*gateways)
    await worker.registered(*gateways)
    stranger = Tokens(RequestId(Incarnation(0xE2), 1, 1), WORKER, 0, (7,))
    step = [Tokens(gateways[i % 2].asks(i), WORKER, i, (i,)) for i in range(1, 6)]
    many = [Tokens(gateways[1].asks(i), WORKER, i, (i,)) for i in range(TOKENS_PER_FRAME_MAX + 1)]
    worker.links.send_step([stranger, *step])
    worker.links.send_step(many)
    worker.links.send_step([])

    def heard(gateway: Gateway) -> list[tuple[Tokens, ...]]:
        return [message.tokens for message in gateway.heard if isinstance(message, StepTokens)]

    await until(lambda: len(heard(gateways[1])) == 3 and heard(gateways[0]), "four frames")
    assert heard(gateways[0]) == [tuple(step[1::2])]
    assert heard(gateways[1]) == [tuple(step[::2]), tuple(many[:-1]), tuple(many[-1:])]
    worker.links.close()
    for gateway in gateways:
        gateway.channel.close()


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of what links have said."""
    return [record for record in caplog.records if record.name == gateway_link.__name__]


async def test_refusal_is_logged_once(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.refusal = "the table is full"
    worker = Worker(gateway)
    with caplog.at_level(logging.ERROR):
        await until(
            lambda: worker.tick() and len(gateway.seqs) > 5 and worker.links.gateways(), "answers"
        )
    assert [vars(r)["why"] for r in records(caplog)] == ["the table is full"]
    assert worker.links.gateways()[0]["refusal"] == "the table is full"
    worker.links.close()


async def test_worker_that_nobody_answers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    gateway.answers = False
    worker = Worker(gateway)
    start = worker.now
    with caplog.at_level(logging.WARNING):
        for seconds in (1, 4, 6, 7, 8, 11, 13, 30):
            worker.links.handle_timer(start + seconds)
    assert [vars(r)["seconds"] for r in records(caplog)] == [6, 13, 30]
    worker.links.close()
    gateway.channel.close()


async def test_a_worker_that_no_gateway_uses_says_why() -> None:
    """One that listens is enough."""
    gateways = Gateway(0xE0), Gateway(0xE1)
    worker = Worker(*gateways)
    first, second = (gateway.address for gateway in gateways)
    silent = [f"gateway {first} does not answer", f"gateway {second} does not answer"]
    assert worker.links.complaints() == silent
    await worker.registered(*gateways)
    assert worker.links.complaints() == []
    gateways[0].refusal = "the table is full"
    await until(
        lambda: worker.tick() and worker.links.gateways()[0]["refusal"], "the first one's refusal"
    )
    assert worker.links.complaints() == []
    gateways[1].refusal = "another protocol"
    await until(lambda: worker.tick() and worker.links.complaints(), "the second one's")
    assert worker.links.complaints() == [
        f"gateway {first}: the table is full",
        f"gateway {second}: another protocol",
    ]
    worker.links.close()
    for gateway in gateways:
        gateway.channel.close()


async def test_gateway_that_is_named_twice_is_dialled_once(gateway: Gateway) -> None:
    """Two connections under one routing id would take it from each other for ever."""
    worker = Worker(gateway, gateway)
    await worker.registered(gateway)
    assert len(worker.links.gateways()) == 1
    worker.links.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:port", "host:-1"])
async def test_bad_address(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        GatewayLinks((address,), WORKER, PROTOCOL, Worker.register)
