"""Processes of workers of several ranks, forked from one that has imported everything.

`rank` is one of the other ranks of a worker whose leader is the test's own process; `prefill` is a
whole prefill worker, which can be killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
import uvloop

import pdrt.decode.rank_process
import pdrt.prefill.rank_process
from pdrt.cli.child import die_with_parent
from pdrt.config import WorkerConfig
from pdrt.kv.layout import KvLayout
from pdrt.model.collectives import RankPlace
from pdrt.prefill.worker import PrefillWorker
from pdrt.transfer import worker_loop
from pdrt.transfer.local import LocalSender
from pdrt.transfer.rank_children import RankChild
from tests.ranks.stand_in import LeaderStandIn, RankStandIn

PAGES = 64
SERVE: dict[str, Any] = {
    "prefill": pdrt.prefill.rank_process.serve,
    "decode": pdrt.decode.rank_process.serve,
}


class RankTask(msgspec.Struct, frozen=True):
    """What one rank is to be."""

    role: str
    rank: int
    ranks: int
    layout: KvLayout
    config: WorkerConfig
    lag_seconds: float = 0.0
    holds_copies: bool = False
    """Until told `open`; each that waits is said."""

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, self.ranks, "", 60.0)


def rank(connection: Connection, task: RankTask, end: socket.socket, ack: socket.socket) -> None:
    """One whose leader is the test's own process."""
    connection.send("started")
    _be_rank(connection, task, end, ack)


def _be_rank(
    connection: Connection, task: RankTask, end: socket.socket, ack: socket.socket
) -> NoReturn:
    os._exit(uvloop.run(_serve_rank(connection, task, end, ack)).value)


async def _serve_rank(
    connection: Connection, task: RankTask, end: socket.socket, ack: socket.socket
) -> Any:
    worker_loop.TICK_SECONDS = 0.01
    executor = RankStandIn(PAGES, task.layout, task.rank, task.ranks, ack)
    executor.lag_seconds = task.lag_seconds
    executor.on_step = lambda: connection.send("step")
    if task.holds_copies:
        _hold_copies(connection)
    return await SERVE[task.role](task.config, task.place, executor, end)


def _hold_copies(connection: Connection) -> None:
    may_copy = threading.Event()
    original = LocalSender._copy

    def listen() -> None:
        connection.recv()
        may_copy.set()

    def copy(*arguments: Any) -> Any:
        connection.send("copy")
        may_copy.wait()
        return original(*arguments)

    threading.Thread(target=listen, daemon=True).start()
    LocalSender._copy = copy  # type: ignore[method-assign]


class OwnChild:
    """A fork of this process, in the place of what `subprocess` starts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


def prefill(connection: Connection, task: RankTask) -> None:
    """A whole worker of `task.ranks`: the others are forks of this process, which has no threads
    yet. What they say of copies that wait comes over the same connection."""
    children: list[Any] = []
    acks: list[socket.socket] = []
    for number in range(1, task.ranks):
        ours, theirs = socket.socketpair()
        ack, their_ack = socket.socketpair()
        leader = os.getpid()
        if (pid := os.fork()) == 0:
            die_with_parent(leader)
            _be_rank(connection, msgspec.structs.replace(task, rank=number), theirs, their_ack)
        theirs.close()
        their_ack.close()
        children.append(RankChild(number, OwnChild(pid), ours))  # type: ignore[arg-type]
        acks.append(ack)
    sys.exit(uvloop.run(_lead(connection, task, children, acks)).value)


async def _lead(
    connection: Connection, task: RankTask, children: list[Any], acks: list[socket.socket]
) -> Any:
    executor: Any = LeaderStandIn(PAGES, task.layout, acks)
    executor.on_step = lambda rows: connection.send(f"step of {rows}")
    worker = PrefillWorker(task.config, executor, children)
    await asyncio.sleep(0)
    connection.send(worker.facts() | {"pids": [os.getpid(), *(c.pid for c in children)]})
    return await worker.run()
