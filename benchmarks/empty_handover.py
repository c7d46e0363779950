"""What a hand-over costs besides its bytes and its forwards: real workers, each a process on cores
of its own, with a stand-in for the executor that returns at once, and pages of 256 bytes.

A request goes from `Submit` on the decode worker, over grant, room, writes, first token and drain,
to pages that its sequence may decode on. One at a time, with prompts that nobody has cached.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys

import uvloop
from as_worker import as_worker
from rows import Figures
from stand_in import StandIn, instant_executor
from stand_in_gateway import Peer, gateway_process

from pdrt.config import WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.errors import PdrtError
from pdrt.ids import RequestId
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.gateway_messages import Submit
from pdrt.sampling import Sampling
from pdrt.transfer.worker_loop import ExitCode

PROMPTS = {"control": 512, "control_2k": 2048}
"""Tokens of the prompt, by row: what one prefill step takes, and four of them."""
PAGES = 1024
WARM_UP, HANDOVERS = 20, 200
PAIRED_SECONDS_MAX = 60.0
POLL_SECONDS = 0.002
"""While one is under way, this process looks at it no more often than that."""
REQUEST_SECONDS = 30.0
PHASES = ("queued", "prefill", "transfer")


async def prefill(address: str) -> None:
    """Until its stdin ends."""
    executor = instant_executor(PAGES)
    with as_worker("prefill", executor.pool):
        worker = PrefillWorker(WorkerConfig(gateway=(address,)), executor)  # type: ignore[arg-type]
        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(sys.stdin.read)
        worker.loop.end(ExitCode.STOPPED, "measured")
        await running


def prefill_process(address: str) -> subprocess.Popen[bytes]:
    """It ends with the context."""
    return subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)


async def measure(prompt_tokens: int) -> Figures:
    """Milliseconds of one hand-over.

    Raises:
        PdrtError: the workers do not find each other, or a request fails.
    """
    with gateway_process() as peer, prefill_process(peer.address):
        return await _measure(peer, prompt_tokens)


async def _measure(peer: Peer, prompt_tokens: int) -> Figures:
    executor = instant_executor(PAGES)
    with as_worker("decode", executor.pool):
        timings = await _timings(peer, executor, prompt_tokens)
    sums = [1e3 * sum(each[phase] for phase in PHASES) for each in timings]
    parts = {
        f"{phase}_ms": 1e3 * statistics.median(each[phase] for each in timings) for phase in PHASES
    }
    p99 = statistics.quantiles(sums, n=100)[98]
    return {"handover_ms": statistics.median(sums), "handover_p99_ms": p99, **parts}


async def _timings(peer: Peer, executor: StandIn, prompt_tokens: int) -> list[dict[str, float]]:
    """Seconds by phase, of each hand-over once it is warm."""
    worker = DecodeWorker(WorkerConfig(gateway=(peer.address,)), executor)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    try:
        endpoints = await _paired(worker)
        all_timings = []
        for serial in range(1, WARM_UP + HANDOVERS + 1):
            name = RequestId(peer.incarnation, serial, 1)
            all_timings.append(await _hand_over(worker, name, prompt_tokens, endpoints))
    finally:
        worker.loop.end(ExitCode.STOPPED, "measured")
        await running
        executor.pool.close()
    return all_timings[WARM_UP:]


async def _paired(worker: DecodeWorker) -> tuple[str, ...]:
    for _ in range(int(PAIRED_SECONDS_MAX / POLL_SECONDS)):
        if endpoints := worker.table.usable_endpoints():
            return tuple(endpoints)
        await asyncio.sleep(POLL_SECONDS)
    raise PdrtError("the workers were not paired")


async def _hand_over(
    worker: DecodeWorker, name: RequestId, tokens: int, endpoints: tuple[str, ...]
) -> dict[str, float]:
    """Seconds by phase."""
    sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = tuple(1 + (name.serial * tokens + n) % 60_000 for n in range(tokens))
    submit = Submit(name, worker.incarnation, prompt, (), sampling, REQUEST_SECONDS, endpoints)
    worker._on_request(submit)
    request = worker.scheduler.requests.get(name)
    if request is None:
        raise PdrtError("the decode worker refused a request")
    while name in worker.scheduler.requests:
        if worker.loop.is_ending:
            raise PdrtError("the decode worker has ended")
        await asyncio.sleep(POLL_SECONDS)
    if "decode" not in request.timings or request.timings.keys() < set(PHASES):
        raise PdrtError(f"a request was not handed over: {request.timings}")
    return request.timings


if __name__ == "__main__":
    match sys.argv[1:]:
        case [address]:
            uvloop.run(prefill(address))
        case _:
            sys.exit("it is measured by transfer.py")
