"""Several workers of one role in one process, on one loop, with a timed stand-in for the forward.

Told `hold`, their forwards wait in their middle until `go`; the connection's end ends them all.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from multiprocessing.connection import Connection

import msgspec
import uvloop

from pdrt.config import ProtocolConfig, SchedulerConfig, WorkerConfig
from pdrt.decode.worker import DecodeWorker
from pdrt.prefill.worker import PrefillWorker
from pdrt.protocol.gateway_messages import Role
from pdrt.transfer.worker_loop import ExitCode, exit_now
from tests.scale.executor import TimedExecutor


class Crew(msgspec.Struct, frozen=True):
    """What runs in one process."""

    role: Role
    workers: int
    gateway: str
    """HOST:PORT."""
    protocol: ProtocolConfig
    pages: int = 1024
    """Of each worker."""
    step_seconds: float = 0.03


def main(connection: Connection, crew: Crew) -> None:
    """Says the incarnations of its workers, and serves."""
    logging.getLogger("pdrt").setLevel(logging.ERROR)  # rooms that fail are what is tested
    gc.freeze()
    uvloop.run(_serve(connection, crew))
    exit_now(ExitCode.STOPPED)


async def _serve(connection: Connection, crew: Crew) -> None:
    executors = [TimedExecutor(crew.pages, crew.step_seconds) for _ in range(crew.workers)]
    kind = PrefillWorker if crew.role is Role.PREFILL else DecodeWorker
    config = WorkerConfig(
        gateway=(crew.gateway,), protocol=crew.protocol, scheduler=SchedulerConfig()
    )
    workers = [kind(config, executor) for executor in executors]  # type: ignore[arg-type]

    def obey() -> None:
        try:
            order = connection.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(connection.fileno())
            for worker in workers:
                worker.loop.end(ExitCode.STOPPED, "the test is over")
            return
        for executor in executors:
            if order == "hold":
                executor.gate.clear()
            else:
                executor.gate.set()

    asyncio.get_running_loop().add_reader(connection.fileno(), obey)
    connection.send([worker.incarnation for worker in workers])
    await asyncio.gather(*map(_run, workers))


async def _run(worker: PrefillWorker | DecodeWorker) -> None:
    code = await worker.run()
    if code is not ExitCode.STOPPED:
        os._exit(code.value)  # whoever watches this process must see it
