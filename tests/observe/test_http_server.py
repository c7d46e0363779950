"""What a client may make the server hold."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from itertools import repeat

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from pdrt.observe.http_server import (
    ACCEPTED_PER_TURN,
    DIRECT_BODY,
    HEAD_BYTES_MAX,
    DirectBody,
    HttpServer,
)

HANG_SECONDS = 120.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
BYTES_MAX = 64 * HEAD_BYTES_MAX
"""Far beyond what sockets hold on their way."""


async def count_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = str(size).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(count_body)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.accepting.wait()
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    async with asyncio.timeout(HANG_SECONDS):
        await serving


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (HEAD, b"x-many: of them\r\n" * 100),
        (HEAD + b"x-long: ", b"y" * 1000),
        (b"GET /", b"z" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-trailer: y\r\n" * 100),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"e" * 1000),
        (b"", b"\r\n" * 500),
    ],
    ids=["headers", "one_header", "path", "trailers", "chunk_extension", "blank_lines"],
)
async def test_what_never_ends_is_refused(port: int, begin: bytes, piece: bytes) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begin)
        sent = 0
        with pytest.raises(ConnectionError):
            for data in repeat(piece, BYTES_MAX // len(piece)):
                writer.write(data)
                await writer.drain()
                # The server shares the loop, and sockets may hold all of it before they fill up.
                await asyncio.sleep(0)
                sent += len(data)
            pytest.fail(f"{sent} bytes were taken")
        writer.close()


async def test_large_bodies_and_one_request_after_another_are_served(port: int) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for size in (BYTES_MAX, 0, 3 * HEAD_BYTES_MAX):
            head = HEAD + b"x-pad: " + b"p" * 30_000 + b"\r\n"
            writer.write(head + f"content-length: {size}\r\n\r\n".encode() + b"b" * size)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        writer.close()


async def _turns_until_accepted(count: int) -> int:
    """Of the loop, for so many connections that have come while it did something else."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=count)
    server = HttpServer(count_body)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.accepting.wait()
    clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
    turns = 0
    while len(server.server_state.connections) < count:
        await asyncio.sleep(0)
        turns += 1
    for client in clients:
        client.close()
    server.should_exit = server.force_exit = True
    async with asyncio.timeout(HANG_SECONDS):
        await serving
    return turns


def test_a_burst_of_clients_comes_in_at_a_few_turns_of_the_loop() -> None:
    """On the loop that gateways and workers run on."""
    count = 8 * ACCEPTED_PER_TURN
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(_turns_until_accepted(count)) < count / 2


async def _serve_and_cancel() -> tuple[str, int]:
    """Where nobody listens any more."""
    listener = socket.create_server(("127.0.0.1", 0))
    address: tuple[str, int] = listener.getsockname()
    server = HttpServer(count_body)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.accepting.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    return address


async def test_listeners_of_a_cancelled_server_are_watched_no_more() -> None:
    """What opens next gets the numbers of their descriptors, and is watched like anything else."""
    await _serve_and_cancel()
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    pairs = [socket.socketpair() for _ in range(ACCEPTED_PER_TURN)]
    for ours, theirs in pairs:
        heard.clear()
        loop.add_reader(ours.fileno(), heard.set)
        theirs.send(b"x")
        async with asyncio.timeout(HANG_SECONDS):
            await heard.wait()
        loop.remove_reader(ours.fileno())
    for each in itertools.chain(*pairs):
        each.close()


def test_a_cancelled_server_closes_its_listeners_on_our_loop_too() -> None:
    async def run() -> None:
        address = await _serve_and_cancel()
        await asyncio.sleep(0)  # libuv closes at the end of a turn
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def _count_down(scope: Scope, receive: Receive, send: Send) -> None:
    """Pieces by both ways; the direct one is open only between the first and the last."""
    direct: DirectBody = scope["extensions"][DIRECT_BODY]
    seen = [direct.is_open]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"9", "more_body": True})
    seen.append(direct.is_open)
    for pieces in ((b"8", b"7"), (b"6",)):
        for piece in pieces:
            direct.write(piece)
        await asyncio.sleep(0)
    direct.write(b"5")
    direct.flush()
    await send({"type": "http.response.body", "body": b"4", "more_body": False})
    seen.append(direct.is_open)
    assert seen == [False, True, False]


async def test_direct_pieces_and_sent_ones_keep_their_order() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(_count_down)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.accepting.wait()
    async with asyncio.timeout(HANG_SECONDS):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    server.should_exit = server.force_exit = True
    async with asyncio.timeout(HANG_SECONDS):
        await serving
    assert [line for line in body.split(b"\r\n") if line] == list(
        b"1 9 1 8 1 7 1 6 1 5 1 4 0".split()
    )
