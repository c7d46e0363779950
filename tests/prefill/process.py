"""A prefill worker with the stand-in executor, in a process of its own.

Says where it is, then what it does; told `open`, it holds nothing back any more.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from multiprocessing.connection import Connection

import msgspec
import uvloop

from pdrt.config import WorkerConfig
from pdrt.prefill.worker import PrefillWorker
from pdrt.transfer.engine import WriteRequest
from pdrt.transfer.local import LocalSender
from pdrt.transfer.local import _Instance as Instance
from tests.decode.deployment import Deployment
from tests.prefill.executor import StandInExecutor


def main(
    connection: Connection, gateway: str, hold: str, kv_checksum: bool = False, port: int = 0
) -> None:
    """`hold`: what is held back, `steps`, `copies` or nothing; `broken`: copies turn a bit.
    `port`: of its endpoint."""
    config = Deployment.config_for(gateway, kv_checksum=kv_checksum)
    sys.exit(uvloop.run(_serve(connection, msgspec.structs.replace(config, port=port), hold)))


async def _serve(connection: Connection, config: WorkerConfig, hold: str) -> int:
    executor = StandInExecutor(64)
    executor.on_step = lambda rows: connection.send(f"step of {rows}")
    may_copy = threading.Event()
    if hold == "steps":
        executor.gate.clear()
    if hold == "copies":
        _hold_copies(connection, may_copy)
    if hold == "broken":
        _break_copies()
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


def _break_copies() -> None:
    original = LocalSender._copy

    def copy(sender: LocalSender, instance: Instance, request: WriteRequest) -> None:
        original(sender, instance, request)
        last = request.ranges[-1]
        end = instance.addresses[request.decode_rank] + last.target_offset + last.length
        ctypes.c_uint8.from_address(end - 1).value ^= 1

    LocalSender._copy = copy  # type: ignore[method-assign]
