"""What a decode step costs besides the forward: `python benchmarks/control.py`.

A real decode worker with a stand-in for the executor that returns at once, and a gateway in
another process that takes its tokens. Milliseconds per step, of the worker's event loop thread:

    between    from the end of a step to the start of the next: the device has nothing to do
    step       CPU time of everything, the next loop turn included: what a step cannot be
               faster than, and what runs beside a forward that takes longer

With `--cluster-key FILE` it takes every row without and with the key in turn, and the CPU time of
all threads of the worker and of the gateway: the difference is what CURVE costs per step, which is
one message with a token of each sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

import uvloop
from bars import Document
from documents import Output, add_flags, finish
from rows import (
    Attempt,
    Figures,
    Row,
    Take,
    attempt_once,
    flat,
    print_rows,
    repeat,
    settle,
    unclean,
)
from stand_in import LAYOUT, instant_executor
from stand_in_gateway import Peer, gateway_process

from pdrt.config import SchedulerConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.ids import Incarnation, RequestId, RoomId
from pdrt.protocol.gateway_messages import Submit
from pdrt.sampling import Sampling
from pdrt.transfer.worker_loop import ExitCode

BATCHES = (1, 8, 64)
CONTEXT_TOKENS = 256


class Clock:
    """Times of one measured run."""

    def __init__(self, warm_up: int, steps: int, peer: Peer) -> None:
        self.between: list[float] = []
        self.cpu_seconds = 0.0
        self.worker_seconds = 0.0
        self.gateway_seconds = 0.0
        self._peer = peer
        self.is_over = asyncio.Event()
        self._first, self._last = warm_up, warm_up + steps
        self._count = 0
        self._ended_at = 0.0

    def begun(self) -> None:
        if self._first < self._count <= self._last:
            self.between.append(time.perf_counter() - self._ended_at)
        if self._count == self._first:
            self._add(-1)
        if self._count == self._last:
            self._add(1)
            self.is_over.set()
        self._count += 1

    def _add(self, sign: int) -> None:
        self.cpu_seconds += sign * time.thread_time()
        self.worker_seconds += sign * time.process_time()
        self.gateway_seconds += sign * self._peer.cpu_seconds()

    def ended(self) -> None:
        self._ended_at = time.perf_counter()


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


async def measure(batch: int, steps: int, peer: Peer) -> Figures:
    clock = Clock(warm_up=steps // 4, steps=steps, peer=peer)
    each = LAYOUT.pages_for(CONTEXT_TOKENS + 2 * steps)
    executor = instant_executor(batch * each)
    executor.begun = lambda rows: clock.begun()
    executor.ended = lambda rows: clock.ended()
    limits = SchedulerConfig(max_num_seqs=batch, stream_tokens_max=1 << 30)
    config = WorkerConfig(gateway=(peer.address,), scheduler=limits, security=peer.security)
    worker = DecodeWorker(config, executor)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    while worker.links.gateways()[0]["gateway"] is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for serial in range(1, batch + 1):
        join(worker, peer.incarnation, serial)
    worker.steps.wake()
    await clock.is_over.wait()
    worker.loop.end(ExitCode.STOPPED, "measured")
    await running
    executor.pool.close()
    return {
        "between_ms": statistics.median(clock.between) * 1e3,
        "between_p99_ms": statistics.quantiles(clock.between, n=100)[98] * 1e3,
        "step_ms": clock.cpu_seconds / steps * 1e3,
        "worker_ms": clock.worker_seconds / steps * 1e3,
        "gateway_ms": clock.gateway_seconds / steps * 1e3,
    }


def taker(batch: int, steps: int, peer: Peer) -> Take:
    return lambda _: measure(batch, steps, peer)


async def measure_all(options: argparse.Namespace, peer: Peer) -> list[Row]:
    return [
        await repeat(f"batch_{batch}", taker(batch, options.steps, peer), (), options.repeats)
        for batch in BATCHES
    ]


async def measure_key(options: argparse.Namespace, bare: Peer, keyed: Peer) -> list[Row]:
    """In turn: both see the same machine."""
    attempts: dict[str, list[Attempt]] = {}
    for batch in BATCHES:
        for number in range(options.repeats):
            for name, peer in ((f"batch_{batch}", bare), (f"batch_{batch}_with_key", keyed)):
                take = taker(batch, options.steps, peer)
                attempt = await attempt_once(name, take, (), number)
                attempts.setdefault(name, []).extend([attempt] if attempt else [])
    return [settle(name, taken, options.repeats) for name, taken in attempts.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per batch size")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many clean runs")
    parser.add_argument("--cluster-key", metavar="FILE", help="what CURVE with this key costs")
    add_flags(parser)
    options = parser.parse_args()
    key = options.cluster_key
    with gateway_process() as peer:
        if key is None:
            rows = uvloop.run(measure_all(options, peer))
        else:
            with gateway_process(key) as keyed:
                rows = uvloop.run(measure_key(options, peer, keyed))
    print_rows(rows)
    document = Document("control", flat(rows), unclean(rows))
    return finish(document, {"rows": rows}, Output(options.json, options.check))


if __name__ == "__main__":
    sys.exit(main())
