"""A whole deployment from its start to its end: all pairs are made, more rooms are open at once
than anybody waits for, and workers come, leave and die while it serves."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Role
from tests.scale.cluster import Cluster, Host, cluster, until
from tests.scale.executor import VOCABULARY, output_of

OUTPUT_TOKENS = 8
PROMPT_TOKENS = range(20, 80)
PATIENT = ProtocolConfig(
    hello_interval_seconds=3.0,
    silence_seconds=30.0,
    kill_lost_after_seconds=200.0,
    fence_after_seconds=300.0,
)
"""A hundred workers share few cores here: one that has no turn for seconds is not dead. And many of
them share a process: to kill one of them for its silence would be to kill them all."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Shape(msgspec.Struct, frozen=True):
    """How large it is."""

    workers: int
    """Of each role."""
    hosts: int
    """Processes that they share, of each role, beside the one of those that leave."""
    rooms: int
    """Alive at once; and so many clients ask all the time."""
    guests: int
    """Workers of each role that join under load and are killed; so many of the first ones leave."""
    protocol: ProtocolConfig
    idle_seconds: float = 0.0
    """Over which the processor time of heartbeats is taken; 0: it is not."""


class Figures(msgspec.Struct):
    """What was seen. Nothing here is asserted."""

    pairs: int = 0
    handshake_seconds: float = 0.0
    """From the first prefill worker's start to the last pair."""
    handshake_cpu_seconds: float = 0.0
    """Of all workers and the gateway."""
    idle_cpu_seconds: dict[str, float] = {}
    """Per second, by who took it."""
    decode_bytes_per_pair: float = 0.0
    worker_bytes: dict[str, float] = {}
    """Not shared with the process that all were forked from, by role."""
    worker_files: dict[str, float] = {}
    """Open, by role."""
    rooms_open: int = 0
    answers: int = 0
    moved: int = 0
    """Of them, by more than one decode or prefill worker."""
    answers_per_second: float = 0.0
    join_seconds: float = 0.0
    leave_seconds: float = 0.0
    quiet_seconds: float = 0.0


class Clients:
    """Each asks one thing after another; every answer must be the right one."""

    def __init__(self, cluster: Cluster, group: asyncio.TaskGroup, count: int) -> None:
        self.answers = self.moved = 0
        self.served: Counter[Incarnation] = Counter()
        """Answers by the workers that had a part in them."""
        self._cluster = cluster
        self._is_over = False
        for number in range(count):
            group.create_task(self._run(random.Random(number)))

    async def _run(self, draw: random.Random) -> None:
        while not self._is_over:
            length = draw.choice(PROMPT_TOKENS)
            prompt = [draw.randrange(1, VOCABULARY) for _ in range(length)]
            tokens, stream = await self._cluster.ask(prompt, OUTPUT_TOKENS)
            assert tokens == output_of(prompt, OUTPUT_TOKENS)
            self.answers += 1
            self.moved += len(stream.decodes) > 1 or len(stream.prefills) > 1
            self.served.update({*stream.decodes, *stream.prefills})

    async def reach(self, answers: int) -> None:
        await self._cluster.until(lambda: self.answers >= answers, f"{answers} answers")

    async def served_by(self, workers: Sequence[Incarnation]) -> None:
        await self._cluster.until(
            lambda: all(self.served[worker] for worker in workers), "all have served"
        )

    def stop(self) -> None:
        """After what is being asked."""
        self._is_over = True


async def play(shape: Shape) -> Figures:
    figures = Figures()
    async with cluster(shape.protocol) as made:
        leavers = await pair_all(made, shape, figures)
        if shape.idle_seconds:
            await measure_idle(made, shape, figures)
        made.tell(Role.PREFILL, "hold")
        async with asyncio.TaskGroup() as group:
            clients = Clients(made, group, shape.rooms)
            await all_rooms_open(made, shape.rooms)
            figures.rooms_open = shape.rooms
            guests = await join(made, shape, figures)
            made.tell(Role.PREFILL, "go")
            began = time.monotonic()
            await clients.reach(shape.rooms)
            await clients.served_by([worker for each in guests for worker in each.workers])
            await leave(made, guests, leavers, figures)
            await clients.reach(clients.answers + shape.rooms)
            figures.answers_per_second = clients.answers / (time.monotonic() - began)
            clients.stop()
        figures.answers, figures.moved = clients.answers, clients.moved
        began = time.monotonic()
        await made.quiet()
        figures.quiet_seconds = time.monotonic() - began
    return figures


async def pair_all(made: Cluster, shape: Shape, figures: Figures) -> list[Host]:
    """Returns those that will leave."""
    each = (shape.workers - shape.guests) // shape.hosts
    crews = [shape.guests, *[each] * shape.hosts]
    assert sum(crews) == shape.workers, "hosts of equal size"
    decodes = [await made.start(Role.DECODE, workers) for workers in crews]
    await made.settled()
    alone = sum(_private_bytes(host.pid) for host in made.hosts)
    began, cpu = time.monotonic(), cpu_seconds(made)
    prefills = [await made.start(Role.PREFILL, workers) for workers in crews]
    await made.settled()
    figures.pairs = shape.workers**2
    figures.handshake_seconds = time.monotonic() - began
    figures.handshake_cpu_seconds = sum((cpu_seconds(made) - cpu).values())
    paired = sum(_private_bytes(host.pid) for host in decodes)
    figures.decode_bytes_per_pair = (paired - alone) / figures.pairs
    for role in Role:
        pids = [host.pid for host in made.hosts if host.role is role]
        figures.worker_bytes[role.value] = sum(map(_private_bytes, pids)) / shape.workers
        figures.worker_files[role.value] = sum(map(_open_files, pids)) / shape.workers
    return [decodes[0], prefills[0]]


async def measure_idle(made: Cluster, shape: Shape, figures: Figures) -> None:
    before = cpu_seconds(made)
    await asyncio.sleep(shape.idle_seconds)
    spent = cpu_seconds(made) - before
    figures.idle_cpu_seconds = {who: spent[who] / shape.idle_seconds for who in spent}


async def all_rooms_open(made: Cluster, rooms: int) -> None:
    async def are_open() -> bool:
        return await made.rooms() == rooms

    await until(are_open, f"{rooms} rooms at once")


async def join(made: Cluster, shape: Shape, figures: Figures) -> list[Host]:
    began = time.monotonic()
    guests = [await made.start(role, shape.guests) for role in Role]
    await made.settled()
    figures.join_seconds = time.monotonic() - began
    return guests


async def leave(made: Cluster, guests: list[Host], leavers: list[Host], figures: Figures) -> None:
    """The guests die with all they have, and as many others are asked to leave."""
    began = time.monotonic()
    for each in guests:
        made.kill(each)
    for each in leavers:
        made.drain(each)
    await made.settled()
    await made.left()
    figures.leave_seconds = time.monotonic() - began


# What the processes use


def cpu_seconds(made: Cluster) -> Counter[str]:
    """So far, by role; the gateway's is the clients' too."""
    seconds: Counter[str] = Counter({"gateway": time.process_time()})
    for host in made.hosts:
        fields = Path(f"/proc/{host.pid}/stat").read_text().rpartition(")")[2].split()
        seconds[host.role.value] += (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return seconds


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
