"""Workers of several ranks: their leaders in this process, their other ranks in forked ones."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Any

from pdrt.config import WorkerConfig
from pdrt.kv.layout import KvLayout
from pdrt.transfer.rank_children import RankChild
from tests.ranks import process
from tests.ranks.process import PAGES, RankTask
from tests.ranks.stand_in import LeaderStandIn
from tests.transfer.forked import Forked

CODE_MILLISECONDS_MAX = 120_000
"""From the end of a process to its exit code."""


class ForkedChild:
    """A forked process in the place of what `subprocess` starts. Its parent is the fork server, so
    its exit code takes a moment to get here. It is asked for once the process is seen to have
    ended, and waited for."""

    def __init__(self, forked: Forked) -> None:
        self.pid = forked.pid
        self._process = forked.process

    def poll(self) -> int | None:
        poller = select.poll()
        poller.register(self._process.sentinel, select.POLLIN)
        if poller.poll(CODE_MILLISECONDS_MAX):
            self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Ranks:
    """The other ranks of one worker, and what its leader needs."""

    def __init__(self, role: str, config: WorkerConfig, layout: KvLayout, ranks: int) -> None:
        self.forked: list[Forked] = []
        self.children: list[Any] = []
        self.acks: list[socket.socket] = []
        self._task = RankTask(role, 0, ranks, layout, config)

    async def start(self, **changes: Any) -> LeaderStandIn:
        """The leader's executor. `changes`: to the `RankTask`s."""
        fields = {name: getattr(self._task, name) for name in self._task.__struct_fields__}
        tasks = [RankTask(**{**fields, "rank": n, **changes}) for n in range(1, self._task.ranks)]
        for task in tasks:
            ours, theirs = socket.socketpair()
            ack, their_ack = socket.socketpair()
            with theirs, their_ack:
                forked = await asyncio.to_thread(Forked, process.rank, task, theirs, their_ack)
            self.forked.append(forked)
            self.children.append(RankChild(task.rank, ForkedChild(forked), ours))  # type: ignore[arg-type]
            self.acks.append(ack)
        return LeaderStandIn(PAGES, self._task.layout, self.acks)

    def end(self) -> None:
        for forked in self.forked:
            forked.end()
