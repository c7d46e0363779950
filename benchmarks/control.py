"""What a decode step costs besides the forward: `python benchmarks/control.py`.

A real decode worker with a stand-in for the executor that returns at once, and a gateway in
another process that takes its tokens. Milliseconds per step, of the worker's event loop thread:

    between    from the end of a step to the start of the next: the device has nothing to do
    step       CPU time of everything, the next loop turn included: what a step cannot be
               faster than, and what runs beside a forward that takes longer
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

import uvloop
from bars import Document
from documents import Output, add_flags, finish
from rows import Figures, Row, Take, flat, print_rows, repeat, unclean
from stand_in import LAYOUT, StandIn

from pdrt.config import SchedulerConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import Incarnation, RequestId, RoomId, new_incarnation
from pdrt.model.identity import ModelIdentity
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Register, Registered, Submit
from pdrt.sampling import Sampling
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.worker_loop import ExitCode

BATCHES = (1, 8, 64)
CONTEXT_TOKENS = 256
FRAME_BYTES = 1 << 24


class Clock:
    """Times of one measured run."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.between: list[float] = []
        self.cpu_seconds = 0.0
        self.is_over = asyncio.Event()
        self._first, self._last = warm_up, warm_up + steps
        self._count = 0
        self._ended_at = 0.0

    def begun(self) -> None:
        if self._first < self._count <= self._last:
            self.between.append(time.perf_counter() - self._ended_at)
        if self._count == self._first:
            self.cpu_seconds = -time.thread_time()
        if self._count == self._last:
            self.cpu_seconds += time.thread_time()
            self.is_over.set()
        self._count += 1

    def ended(self) -> None:
        self._ended_at = time.perf_counter()


def instant_executor(pages: int, clock: Clock) -> StandIn:
    """Its forwards take one turn of the event loop."""
    identity = ModelIdentity(
        name="instant",
        digest="0",
        max_model_len=1 << 20,
        vocab_size=1 << 16,
        eos_token_ids=(0,),
        architecture="Instant",
    )
    executor = StandIn(identity, pages, lambda rows: 0.0)
    executor.begun = lambda rows: clock.begun()
    executor.ended = lambda rows: clock.ended()
    return executor


async def gateway() -> None:
    """Answers every `Register`, and takes what else comes. Runs until its stdin ends."""
    incarnation = new_incarnation()
    reader: FrameReader[Any] = FrameReader(Register, FRAME_BYTES, "worker")

    def on_frame(peer: bytes, frame: bytes) -> None:
        if b"Register" not in frame[:32]:
            return
        register = reader.read(frame)
        assert register is not None, "its type was looked at"
        answer = Registered(incarnation, register.worker, register.seq)
        channel.send(peer, encode(answer))

    channel = RouterChannel("127.0.0.1", 0, on_frame, FRAME_BYTES)
    print(channel.port, incarnation, flush=True)
    await asyncio.to_thread(sys.stdin.read)


def join(worker: DecodeWorker, gateway: Incarnation, serial: int) -> None:
    """A sequence that begins to decode, without a prefill worker."""
    sampling = Sampling(max_tokens=1 << 20, temperature=0.0)
    prompt = tuple(1000 * serial + place for place in range(CONTEXT_TOKENS))
    name = RequestId(gateway, serial, 1)
    submit = Submit(name, worker.incarnation, prompt, (), sampling, 1e6, ())
    now = time.monotonic()
    request = worker.scheduler.submit(submit, now)
    room = RoomId(worker.incarnation, serial)
    pages = worker.kv.lease(request, room, worker.scheduler.pages_wanted(request), 0)
    assert pages is not None
    pages = worker.kv.keyed(pages, request)
    worker.scheduler.admitted(request, room, now)
    worker.scheduler.first_token(request, 0, now)
    worker.scheduler.take_token(request, 7)
    worker.kv.landed(room, pages)
    worker.kv.pass_on(room, pages, name)
    worker.scheduler.ready(request, pages.all, CONTEXT_TOKENS, now)


async def measure(batch: int, steps: int, address: str, peer: Incarnation) -> Figures:
    clock = Clock(warm_up=steps // 4, steps=steps)
    each = LAYOUT.pages_for(CONTEXT_TOKENS + 2 * steps)
    executor = instant_executor(batch * each, clock)
    limits = SchedulerConfig(max_num_seqs=batch, stream_tokens_max=1 << 30)
    worker = DecodeWorker(WorkerConfig(gateway=(address,), scheduler=limits), executor)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    while worker.links.gateways()[0]["gateway"] is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for serial in range(1, batch + 1):
        join(worker, peer, serial)
    worker.steps.wake()
    await clock.is_over.wait()
    worker.loop.end(ExitCode.STOPPED, "measured")
    await running
    executor.pool.close()
    return {
        "between_ms": statistics.median(clock.between) * 1e3,
        "between_p99_ms": statistics.quantiles(clock.between, n=100)[98] * 1e3,
        "step_ms": clock.cpu_seconds / steps * 1e3,
    }


async def measure_all(options: argparse.Namespace, address: str, peer: Incarnation) -> list[Row]:
    def take(batch: int) -> Take:
        return lambda _: measure(batch, options.steps, address, peer)

    return [await repeat(f"batch_{batch}", take(batch), (), options.repeats) for batch in BATCHES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per batch size")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--gateway", action="store_true", help=argparse.SUPPRESS)
    add_flags(parser)
    options = parser.parse_args()
    if options.gateway:
        uvloop.run(gateway())
        return 0
    with subprocess.Popen(
        [sys.executable, __file__, "--gateway"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdout is not None
        port, incarnation = peer.stdout.readline().split()
        address, name = f"127.0.0.1:{port}", Incarnation(int(incarnation))
        rows = uvloop.run(measure_all(options, address, name))
    print_rows(rows)
    document = Document("control", flat(rows), unclean(rows))
    return finish(document, {"rows": rows}, Output(options.json, options.check))


if __name__ == "__main__":
    sys.exit(main())
