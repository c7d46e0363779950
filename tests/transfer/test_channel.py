"""Frames over real sockets: order, refusal instead of blocking, restarts, and shapes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from pdrt.config import ProtocolConfig
from pdrt.errors import ConfigError
from pdrt.transfer import channel
from pdrt.transfer.channel import DealerChannel, RouterChannel
from pdrt.transfer.handshake import shared_context
from tests.decode.deployment import until

FRAME_BYTES = 1 << 20


class Router:
    """A router and what it has heard."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[tuple[bytes, bytes]] = []
        self.channel = RouterChannel(
            "127.0.0.1", port, lambda peer, frame: self.heard.append((peer, frame)), FRAME_BYTES
        )
        self.endpoint = f"tcp://127.0.0.1:{self.channel.port}"


class Dealer:
    """A dealer and what it has heard."""

    def __init__(self, endpoint: str, name: bytes = b"wa") -> None:
        self.heard: list[bytes] = []
        self.channel = DealerChannel(endpoint, name, self.heard.append, FRAME_BYTES)

    async def say(self, frame: bytes) -> None:
        await until(lambda: self.channel.send(frame), "a connection")


@pytest.fixture
def closing() -> Iterator[Callable[[Router | Dealer], None]]:
    mine: list[Router | Dealer] = []
    yield mine.append
    for each in mine:
        each.channel.close()


@pytest.fixture
async def router(closing: Callable[[Router | Dealer], None]) -> Router:
    router = Router()
    closing(router)
    return router


@pytest.fixture
async def dealer(closing: Callable[[Router | Dealer], None], router: Router) -> Dealer:
    dealer = Dealer(router.endpoint)
    closing(dealer)
    return dealer


async def test_frames_arrive_in_order_both_ways(router: Router, dealer: Dealer) -> None:
    await dealer.say(b"0")
    for number in range(1, 2000):
        assert dealer.channel.send(b"%d" % number)
    await until(lambda: len(router.heard) == 2000, "all of them")
    assert router.heard == [(b"wa", b"%d" % number) for number in range(2000)]
    for number in range(2000):
        assert router.channel.send(b"wa", b"%d" % number)
    await until(lambda: len(dealer.heard) == 2000, "all of them")
    assert dealer.heard == [b"%d" % number for number in range(2000)]


async def test_nobody_there(router: Router, closing: Callable[[Router | Dealer], None]) -> None:
    assert not router.channel.send(b"nobody", b"frame")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    lonely = Dealer(f"tcp://127.0.0.1:{port}")
    closing(lonely)
    assert not lonely.channel.send(b"frame")


async def test_a_full_queue_refuses_and_does_not_block(
    monkeypatch: pytest.MonkeyPatch, closing: Callable[[Router | Dealer], None]
) -> None:
    monkeypatch.setattr(channel, "QUEUE_FRAMES_MAX", 20)
    router = Router()
    closing(router)
    dealer = Dealer(router.endpoint)
    closing(dealer)
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    # Nobody reads while this runs: kernel buffers fill first, then the queues.
    frame = b"x" * 500_000
    sent = 0
    while dealer.channel.send(frame):
        sent += 1
        assert sent < 1000, "it never refuses"
    back = 0
    while router.channel.send(b"wa", frame):
        back += 1
        assert back < 1000, "it never refuses"
    await until(lambda: len(router.heard) == 1 + sent, "what was accepted")
    await until(lambda: len(dealer.heard) == back, "what was accepted")
    await dealer.say(b"again")


async def test_other_shapes_arrive_as_an_empty_frame(router: Router) -> None:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.ROUTING_ID, b"raw")
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(router.endpoint)
    raw.send_multipart([b"one", b"two"])
    raw.send_multipart([b"", b"", b""])
    raw.send_multipart([b""])
    raw.send_multipart([b"fine"])
    await until(lambda: len(router.heard) == 4, "all of them")
    assert [frame for _, frame in router.heard] == [b"", b"", b"", b"fine"]
    router.channel._socket.send_multipart([b"raw", b"x", b"y"])
    raw.close()


async def test_a_dealer_gets_other_shapes_as_an_empty_frame(router: Router, dealer: Dealer) -> None:
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    router.channel._socket.send_multipart([b"wa", b"one", b"two"])
    router.channel.send(b"wa", b"fine")
    await until(lambda: len(dealer.heard) == 2, "both")
    assert dealer.heard == [b"", b"fine"]


async def test_a_router_that_restarts_on_its_port_is_found_again(
    closing: Callable[[Router | Dealer], None],
) -> None:
    first = Router()
    dealer = Dealer(first.endpoint)
    closing(dealer)
    await dealer.say(b"one")
    await until(lambda: first.heard, "the first frame")
    port = first.channel.port
    first.channel.close()

    second: list[Router] = []

    def bind() -> bool:
        try:
            second.append(Router(port))
        except ConfigError:  # libzmq lets go of the port in a thread of its own
            return False
        return True

    await until(bind, "the port")
    closing(second[0])

    def heard() -> bool:
        dealer.channel.send(b"two")
        return bool(second[0].heard)

    await until(heard, "the redialled connection")
    assert second[0].heard[0] == (b"wa", b"two")
    assert second[0].channel.send(b"wa", b"back")
    await until(lambda: b"back" in dealer.heard, "the way back")


async def test_a_routing_id_is_handed_over_to_who_dials_next(
    router: Router, closing: Callable[[Router | Dealer], None]
) -> None:
    old = Dealer(router.endpoint)
    closing(old)
    await old.say(b"old")
    await until(lambda: len(router.heard) == 1, "the old one")
    new = Dealer(router.endpoint)
    closing(new)
    await new.say(b"new")
    await until(lambda: (b"wa", b"new") in router.heard, "the new one")

    def answered() -> bool:
        router.channel.send(b"wa", b"answer")
        return bool(new.heard)

    await until(answered, "an answer to the new one")


async def test_drain_reads_everything(router: Router, dealer: Dealer) -> None:
    await dealer.say(b"0")
    await until(lambda: router.heard, "the first")
    count = 3 * channel.FRAMES_PER_TURN
    for number in range(count):
        assert dealer.channel.send(b"%d" % number)
    poller = zmq.Poller()
    poller.register(router.channel._socket, zmq.POLLIN)
    for _ in range(count):
        # No turn of the loop in between: only `drain` reads.
        if len(router.heard) < 1 + count:
            poller.poll(1000)
            router.channel.drain()
    assert router.heard[1:] == [(b"wa", b"%d" % number) for number in range(count)]


async def test_reading_goes_on_after_sending(router: Router, dealer: Dealer) -> None:
    """Sending may swallow the edge that announces inbound frames."""
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    for number in range(300):
        router.channel.send(b"wa", b"ping%d" % number)
        dealer.channel.send(b"pong%d" % number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await until(lambda: len(dealer.heard) == 300, "every ping")
    await until(lambda: len(router.heard) == 301, "every pong")


async def test_an_oversized_frame_costs_the_sender_its_connection(
    router: Router, closing: Callable[[Router | Dealer], None]
) -> None:
    good, bad = Dealer(router.endpoint, b"good"), Dealer(router.endpoint, b"bad")
    closing(good)
    closing(bad)
    await good.say(b"hello")
    await bad.say(b"x" * (3 * FRAME_BYTES))
    await good.say(b"still here")
    await until(lambda: len(router.heard) == 2, "the good one")
    assert all(peer == b"good" for peer, _ in router.heard)


async def test_last_words_leave_after_close(router: Router) -> None:
    dealer = Dealer(router.endpoint)
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    for _ in range(20):
        assert dealer.channel.send(b"x" * 20_000)
    dealer.channel.close()
    await until(lambda: len(router.heard) == 21, "the last words")


async def test_a_closed_channel_refuses(router: Router, dealer: Dealer) -> None:
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    for each in (router, dealer):
        each.channel.close()
        each.channel.close()
        each.channel.drain()
    assert not dealer.channel.send(b"frame")
    assert not router.channel.send(b"wa", b"frame")


async def test_a_port_in_use_is_named(router: Router) -> None:
    with pytest.raises(ConfigError, match=f":{router.channel.port}"):
        RouterChannel("127.0.0.1", router.channel.port, lambda *_: None, FRAME_BYTES)


@pytest.mark.parametrize("host", ["256.1.1.1", "no such host", "192.0.2.1"])
async def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot bind to {host}:0"):
        RouterChannel(host, 0, lambda *_: None, FRAME_BYTES)


@pytest.mark.parametrize("endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "udp://a:1"])
async def test_a_bad_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        DealerChannel(endpoint, b"wa", lambda _: None, FRAME_BYTES)


def test_libzmq_has_sockets_for_as_many_peers_as_a_worker_may_know() -> None:
    """Its own bound is 1023, and a channel takes three."""
    peers_max = ProtocolConfig().prefill_endpoints_max
    assert int(shared_context().get(zmq.MAX_SOCKETS)) >= 3 * peers_max
