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
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from pdrt.config import SchedulerConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import Incarnation, RequestId, RoomId, new_incarnation
from pdrt.kv.layout import KvLayout
from pdrt.kv.pool import KvPool
from pdrt.model.batch import Row, StepResult
from pdrt.model.identity import ModelIdentity
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Register, Registered, Submit
from pdrt.sampling import Sampling
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.worker_loop import ExitCode

BATCHES = (1, 8, 64)
CONTEXT_TOKENS = 256
LAYOUT = KvLayout(page_size=16, kv_heads=1, layers=1, head_dim=2, dtype="float32")
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


class InstantExecutor:
    """As `Executor`, with a forward that takes one turn of the event loop."""

    def __init__(self, pages: int, clock: Clock) -> None:
        self.identity = ModelIdentity(
            name="instant",
            digest="0",
            max_model_len=1 << 20,
            vocab_size=1 << 16,
            eos_token_ids=(0,),
            architecture="Instant",
        )
        self.layout = LAYOUT
        self.pages = pages
        self.pool = KvPool(LAYOUT, pages, torch.device("cpu"))
        self._clock = clock

    def step_age(self, now: float) -> float:
        return 0.0

    def step(self, rows: Sequence[Row]) -> asyncio.Future[StepResult]:
        self._clock.begun()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        count = len(rows)
        result = StepResult([7] * count, 0.0, [None] * count, [()] * count)
        loop.call_soon(self._end, future, result)
        return future

    def _end(self, future: asyncio.Future[StepResult], result: StepResult) -> None:
        if not future.done():
            self._clock.ended()
            future.set_result(result)


async def gateway() -> None:
    """Answers every `Register`, and takes what else comes. Runs until its stdin ends."""
    incarnation = new_incarnation()
    reader: FrameReader[Any] = FrameReader(Register, FRAME_BYTES, "worker")

    def on_frame(peer: bytes, frame: bytes) -> None:
        if b"Register" not in frame[:32]:
            return
        register = reader.read(frame)
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
    worker.scheduler.admitted(request, room, now)
    worker.scheduler.first_token(request, 0, now)
    worker.scheduler.take_token(request, 7)
    worker.kv.landed(room, pages)
    worker.kv.pass_on(room, pages, name)
    worker.scheduler.ready(request, pages.all, CONTEXT_TOKENS, now)


async def measure(batch: int, steps: int, address: str, peer: Incarnation) -> dict[str, float]:
    clock = Clock(warm_up=steps // 4, steps=steps)
    each = LAYOUT.pages_for(CONTEXT_TOKENS + 2 * steps)
    executor = InstantExecutor(batch * each, clock)
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
        "batch": batch,
        "between_ms": statistics.median(clock.between) * 1e3,
        "between_p99_ms": statistics.quantiles(clock.between, n=100)[98] * 1e3,
        "step_ms": clock.cpu_seconds / steps * 1e3,
    }


async def measure_all(steps: int, address: str, peer: Incarnation) -> list[dict[str, float]]:
    return [await measure(batch, steps, address, peer) for batch in BATCHES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per batch size")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--gateway", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gateway:
        uvloop.run(gateway())
        return
    with subprocess.Popen(
        [sys.executable, __file__, "--gateway"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdout is not None
        port, incarnation = peer.stdout.readline().split()
        address, name = f"127.0.0.1:{port}", Incarnation(int(incarnation))
        results = uvloop.run(measure_all(options.steps, address, name))
    print(f"{'batch':>5}{'between ms':>14}{'p99 ms':>10}{'step ms':>11}")
    for result in results:
        print("{batch:5}{between_ms:14.3f}{between_p99_ms:10.3f}{step_ms:11.3f}".format(**result))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
