"""What a hand-over costs besides its bytes and its forwards: real workers, each a process with a
stand-in for the executor that returns at once, and pages of 256 bytes.

A request goes from `Submit` on the decode worker, over grant, room, writes, first token and drain,
to pages that its sequence may decode on. One at a time, with prompts that nobody has cached.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from typing import Any

import uvloop
from rows import Figures
from stand_in import StandIn

from pdrt.config import WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.errors import PdrtError
from pdrt.ids import Incarnation, RequestId, new_incarnation
from pdrt.model.identity import ModelIdentity
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import Register, Registered, Submit
from pdrt.sampling import Sampling
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.worker_loop import ExitCode

PROMPT_TOKENS = 2048
PAGES = 1024
WARM_UP, HANDOVERS = 20, 200
FRAME_BYTES = 1 << 24
PAIRED_SECONDS_MAX = 60.0
POLL_SECONDS = 0.002
"""While one is under way, this process looks at it no more often than that."""
REQUEST_SECONDS = 30.0
PHASES = ("queued", "prefill", "transfer")


def instant_executor() -> StandIn:
    """Its forwards take one turn of the event loop."""
    identity = ModelIdentity(
        name="instant",
        digest="0",
        max_model_len=1 << 20,
        vocab_size=1 << 16,
        eos_token_ids=(0,),
        architecture="Instant",
    )
    return StandIn(identity, PAGES, lambda rows: 0.0)


async def gateway() -> None:
    """Tells each worker of the prefill workers. Runs until its stdin ends."""
    incarnation = new_incarnation()
    reader: FrameReader[Any] = FrameReader(Register, FRAME_BYTES, "worker")
    endpoints: dict[Incarnation, str] = {}

    def on_frame(peer: bytes, frame: bytes) -> None:
        if b"Register" not in frame[:32]:
            return
        register = reader.read(frame)
        assert register is not None, "its type was looked at"
        if register.endpoint is not None:
            endpoints[register.worker] = register.endpoint
        known = tuple(endpoints.values())
        channel.send(peer, encode(Registered(incarnation, register.worker, register.seq, known)))

    channel = RouterChannel("127.0.0.1", 0, on_frame, FRAME_BYTES)
    print(channel.port, incarnation, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def prefill(address: str) -> None:
    """Until its stdin ends."""
    worker = PrefillWorker(WorkerConfig(gateway=(address,)), instant_executor())  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(sys.stdin.read)
    worker.loop.end(ExitCode.STOPPED, "measured")
    await running


class Child:
    """This file in another process, as a context: it ends with its stdin."""

    def __init__(self, *arguments: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.communicate()

    def line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline()


async def measure() -> Figures:
    """Milliseconds of one hand-over.

    Raises:
        PdrtError: the workers do not find each other, or a request fails.
    """
    with Child("gateway") as own_gateway:
        port, incarnation = own_gateway.line().split()
        address = f"127.0.0.1:{port}"
        with Child("prefill", address):
            return await _measure(address, Incarnation(int(incarnation)))


async def _measure(address: str, peer: Incarnation) -> Figures:
    executor = instant_executor()
    worker = DecodeWorker(WorkerConfig(gateway=(address,)), executor)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    try:
        endpoints = await _paired(worker)
        all_timings = [
            await _hand_over(worker, RequestId(peer, serial, 1), endpoints)
            for serial in range(1, WARM_UP + HANDOVERS + 1)
        ]
    finally:
        worker.loop.end(ExitCode.STOPPED, "measured")
        await running
        executor.pool.close()
    timings = all_timings[WARM_UP:]
    sums = [1e3 * sum(each[phase] for phase in PHASES) for each in timings]
    parts = {
        f"{phase}_ms": 1e3 * statistics.median(each[phase] for each in timings) for phase in PHASES
    }
    p99 = statistics.quantiles(sums, n=100)[98]
    return {"handover_ms": statistics.median(sums), "handover_p99_ms": p99, **parts}


async def _paired(worker: DecodeWorker) -> tuple[str, ...]:
    for _ in range(int(PAIRED_SECONDS_MAX / POLL_SECONDS)):
        if endpoints := worker.table.usable_endpoints():
            return tuple(endpoints)
        await asyncio.sleep(POLL_SECONDS)
    raise PdrtError("the workers were not paired")


async def _hand_over(
    worker: DecodeWorker, name: RequestId, endpoints: tuple[str, ...]
) -> dict[str, float]:
    """Seconds by phase."""
    sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = tuple(1 + (name.serial * PROMPT_TOKENS + n) % 60_000 for n in range(PROMPT_TOKENS))
    submit = Submit(name, worker.incarnation, prompt, (), sampling, REQUEST_SECONDS, endpoints)
    worker._on_request(submit)
    request = worker.scheduler.requests.get(name)
    if request is None:
        raise PdrtError("the decode worker refused a request")
    while name in worker.scheduler.requests:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)
    if "decode" not in request.timings or request.timings.keys() < set(PHASES):
        raise PdrtError(f"a request was not handed over: {request.timings}")
    return request.timings


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["gateway"]:
            uvloop.run(gateway())
        case ["prefill", address]:
            uvloop.run(prefill(address))
        case _:
            sys.exit("it is measured by transfer.py")
