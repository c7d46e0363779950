"""A prefill worker with the stand-in executor, in a process of its own.

Says where it is, then what it does; told `open`, it holds nothing back any more.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from multiprocessing.connection import Connection

import msgspec
import uvloop

from pdrt.prefill.worker import PrefillWorker
from pdrt.transfer.local import LocalSender
from tests.decode.deployment import Deployment
from tests.prefill.executor import StandInExecutor


def main(connection: Connection, gateway: str, hold: str, port: int = 0) -> None:
    """`hold`: what is held back, `steps`, `copies` or nothing. `port`: of its endpoint."""
    sys.exit(uvloop.run(_serve(connection, gateway, hold, port)))


async def _serve(connection: Connection, gateway: str, hold: str, port: int) -> int:
    executor = StandInExecutor(64)
    executor.on_step = lambda rows: connection.send(f"step of {rows}")
    may_copy = threading.Event()
    if hold == "steps":
        executor.gate.clear()
    if hold == "copies":
        _hold_copies(connection, may_copy)
    config = msgspec.structs.replace(Deployment.config_for(gateway), port=port)
    worker = PrefillWorker(config, executor)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()

    def listen() -> None:
        connection.recv()
        may_copy.set()
        loop.call_soon_threadsafe(executor.gate.set)

    threading.Thread(target=listen, daemon=True).start()
    connection.send(worker.facts())
    return (await worker.run()).value


def _hold_copies(connection: Connection, may_copy: threading.Event) -> None:
    original = LocalSender._copy

    def copy(*arguments: object) -> None:
        connection.send("copy")
        may_copy.wait()
        original(*arguments)  # type: ignore[arg-type]

    LocalSender._copy = copy  # type: ignore[method-assign]
