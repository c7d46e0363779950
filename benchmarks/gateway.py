"""What the gateway's processor time per streamed token is: `python benchmarks/gateway.py --check`.

A real gateway, a real prefill and a real decode worker, a process each, with stand-ins for the
forward (a step of 256 rows takes 40 ms); 256 clients stream chat completions from it. Then the same
beside a client that does not read: once what it may leave unread is full, its sequence pauses, and
all others must come to their end although it has not read anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import uvloop
from bars import Document
from documents import Output, add_flags, finish
from local import stop_when_told
from rows import Figures, Row, flat, print_rows, repeat, unclean
from stand_in import StandIn

from pdrt.cli.child import die_with_parent
from pdrt.cli.http import get_json
from pdrt.config import ModelConfig, SchedulerConfig, WorkerConfig
from pdrt.errors import PdrtError
from pdrt.model.fetch import resolve_model
from pdrt.model.identity import read_identity
from pdrt.model.placement import limit_identity

STREAMS = 256
TOKENS = 800
"""Of each stream."""
WARM_UP_TOKENS = 5
"""That every stream has had before the measured time begins."""
UNREAD_TOKENS = 8_000
"""Of the stream that nobody reads: more than sockets and the worker hold for it, and within the
context of most models."""
SMALL_BYTES = 4096
"""What its socket takes in."""
SECONDS_PER_ROW = 0.04 / STREAMS
SECONDS_MIN = 0.002
PAGES = 1 << 14
HANG_SECONDS = 120.0
EVENT = b"data: {"
LAST, DONE = b'"finish_reason":"length"', b"data: [DONE]"
TAIL_BYTES = 64
"""No shorter than any of the three."""
TICK = os.sysconf("SC_CLK_TCK")


class Stream(asyncio.Protocol):
    """One request, and how many events of it have come. Counts and nothing else: what a client
    does is no part of the figures, but it has to keep up.

    Attributes:
        events: so far. Never more than tokens: those that find a client busy share one. So what an
            event costs is no flattering figure of what a token does.
        is_whole: it has all its tokens.
        over: set when the answer has ended, or the connection is gone.
    """

    def __init__(self) -> None:
        self.events = 0
        self.is_whole = False
        self.over = asyncio.Event()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it

    def data_received(self, data: bytes) -> None:
        text = self._tail + data  # what is looked for may come in two pieces
        self.events += text.count(EVENT) - self._tail.count(EVENT)
        self.is_whole |= LAST in text
        self._tail = text[-TAIL_BYTES:]
        if DONE in self._tail:
            self.over.set()
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set()


class Service:
    """The three processes, and requests to them."""

    def __init__(self, model: str, name: str, port: int, processes: list[subprocess.Popen[bytes]]):
        self.model, self.name, self.port = model, name, port
        self.gateway = processes[0].pid
        self.server = tuple(str(process.pid) for process in processes)
        self._serial = 0

    async def stream(self) -> Stream:
        """Of `TOKENS` tokens, read as it comes."""
        connection = await self._request(TOKENS)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Stream, sock=connection)
        return made

    async def unread(self) -> socket.socket:
        """A stream of `UNREAD_TOKENS` tokens of which nothing is read."""
        return await self._request(UNREAD_TOKENS, SMALL_BYTES)

    async def _request(self, tokens: int, buffer_bytes: int | None = None) -> socket.socket:
        self._serial += 1
        body = json.dumps(
            {
                "model": self.name,
                "messages": [{"role": "user", "content": f"{self._serial}: tell me a story."}],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.socket()
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", self.port))
        await loop.sock_sendall(connection, (head + body).encode())
        return connection

    def cpu_seconds(self) -> float:
        """Of the gateway's process, so far."""
        with open(f"/proc/{self.gateway}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    async def unread_tokens(self) -> list[int]:
        """Of every request on the decode worker: made, and not taken by its client."""
        url = f"http://127.0.0.1:{self.port}/status"
        answer = await asyncio.to_thread(get_json, url, None, 10.0)
        status = next(w["status"] for w in answer.body["workers"] if w["role"] == "decode")
        return [r["output_tokens"] - r["tokens_taken"] for r in status["requests"]]


async def streams(service: Service, count: int) -> Figures:
    """`count` streams side by side, from the moment when all of them run until the first ends."""
    made = [await service.stream() for _ in range(count)]
    await _until(lambda: all(stream.events > WARM_UP_TOKENS for stream in made), "all streams run")
    if any(stream.over.is_set() for stream in made):
        raise PdrtError("a stream ended before all had begun: this machine is too busy")
    cpu, events, began = service.cpu_seconds(), _events(made), time.perf_counter()
    await _until(lambda: any(stream.over.is_set() for stream in made), "the first stream ends")
    cpu, events = service.cpu_seconds() - cpu, _events(made) - events
    seconds = time.perf_counter() - began
    await _ended(made)
    if not all(stream.is_whole for stream in made):
        raise PdrtError("a stream broke off")
    return {
        "cpu_us_per_token": 1e6 * cpu / events,
        "tokens_per_second": events / seconds,
        "cpu_percent": 100 * cpu / seconds,
    }


async def beside_unread(service: Service, limit: int) -> Figures:
    """As many, beside one that is not read: with `limit` tokens waiting, its sequence waits too."""
    with await service.unread():
        await _paused(service, limit)
        made = [await service.stream() for _ in range(STREAMS - 1)]
        with contextlib.suppress(TimeoutError):
            await _ended(made)
        still = await service.unread_tokens()
    if limit not in still:
        raise PdrtError(f"the unread stream did not wait: unread tokens {still}")
    return {"share_ended": sum(stream.is_whole for stream in made) / len(made)}


async def _paused(service: Service, limit: int) -> None:
    """Until a sequence has `limit` tokens that its client has not taken: no step has it then."""
    deadline = time.monotonic() + HANG_SECONDS
    while limit not in (unread := await service.unread_tokens()):
        if time.monotonic() > deadline:
            raise PdrtError(f"nothing paused: unread tokens {unread}")
        await asyncio.sleep(0.1)


def _events(made: list[Stream]) -> int:
    return sum(stream.events for stream in made)


async def _ended(made: list[Stream]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        for stream in made:
            await stream.over.wait()


async def _until(holds: Any, what: str) -> None:
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not holds():  # noqa: ASYNC110 (counts, no event)
                await asyncio.sleep(0.005)
    except TimeoutError as error:
        raise PdrtError(f"waited in vain until {what}") from error


@contextlib.asynccontextmanager
async def service(model: str) -> AsyncIterator[Service]:
    port, worker_port = _free_port(), _free_port()
    name = read_identity(resolve_model(model, print)).name
    gateway = [sys.executable, "-m", "pdrt", "gateway", "--model", model, "--port", str(port)]
    gateway += ["--worker-port", str(worker_port), "--served-model-name", name]
    gateway += ["--parent-pid", str(os.getpid())]
    commands = [gateway]
    for role in ("prefill", "decode"):
        address = f"127.0.0.1:{worker_port}"
        commands.append([sys.executable, __file__, "--worker", role, address, "--model", model])
    processes = list(map(_start, commands))
    try:
        await asyncio.to_thread(_wait_ready, port, processes)
        yield Service(model, name, port, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _wait_ready(port: int, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if get_json(f"http://127.0.0.1:{port}/ready", None, 2.0).status == 200:
                return
        if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
            raise PdrtError("gateway and workers did not become ready")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def work(role: str, address: str, model: str) -> None:
    """A worker with a stand-in for the forward, until it is killed."""
    from pdrt.decode.worker import DecodeWorker
    from pdrt.prefill.worker import PrefillWorker

    die_with_parent(os.getppid())
    identity = limit_identity(read_identity(resolve_model(model, print)), ModelConfig(model=model))
    identity = msgspec.structs.replace(identity, max_model_len=1 << 15)
    executor = StandIn(identity, PAGES, lambda rows: max(SECONDS_MIN, rows * SECONDS_PER_ROW))
    limits = SchedulerConfig(max_num_seqs=STREAMS)
    config = WorkerConfig(gateway=(address,), scheduler=limits)
    kind = PrefillWorker if role == "prefill" else DecodeWorker
    await kind(config, executor).run()  # type: ignore[arg-type]


async def measure(model: str, repeats: int) -> list[Row]:
    async with service(model) as made:
        limit = SchedulerConfig().stream_tokens_max
        return [
            await repeat("streams", lambda _: streams(made, STREAMS), made.server, repeats),
            await repeat("unread", lambda _: beside_unread(made, limit), made.server, 1),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelConfig().model, help="whose tokenizer is used")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    add_flags(parser)
    options = parser.parse_args()
    stop_when_told()
    if options.worker:
        role, address = options.worker
        uvloop.run(work(role, address, options.model))
        return 0
    try:
        rows = uvloop.run(measure(options.model, options.repeats))
    except PdrtError as error:
        parser.error(str(error))
    print_rows(rows)
    document = Document("gateway", flat(rows), unclean(rows))
    return finish(document, {"rows": rows}, Output(options.json, options.check))


if __name__ == "__main__":
    sys.exit(main())
