"""What can happen to a process. Each fault does it to one and returns how to undo it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import signal
from collections.abc import Sequence

import msgspec

from tests.chaos import proc
from tests.chaos.cluster import Cluster
from tests.chaos.kinds import LONG_SECONDS, SHORT_SECONDS, Heal, Kind
from tests.chaos.network_faults import HOST_KINDS


def kill(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """SIGKILL; its supervisor starts another."""
    cluster.processes[name].kill()

    async def heal() -> None:
        cluster.start(name)

    return heal


def leave(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """SIGTERM: it finishes what it has, for a while."""
    process = cluster.processes[name]
    process.send(signal.SIGTERM)

    async def heal() -> None:
        assert await asyncio.to_thread(process.wait) == 0, process.text()
        cluster.start(name)

    return heal


def stop(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """SIGSTOP: it lives, and does nothing."""
    process = cluster.processes[name]
    process.send(signal.SIGSTOP)

    async def heal() -> None:
        process.send(signal.SIGCONT)

    return heal


def close_sockets(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """Some of its connections end under it, by FIN or by RST."""
    pid = cluster.processes[name].pid
    connections = proc.connections_of(pid)
    chosen = dice.sample(connections, dice.randint(1, len(connections)))
    ways = (proc.end_connection, proc.reset_connection)
    assert any([dice.choice(ways)(pid, fd) for fd in chosen]), "none could be closed"
    return _nothing


def exhaust_fds(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """It can open nothing more: no connection, no file of /proc, no eventfd."""
    pid = cluster.processes[name].pid
    in_use = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    first_free = next(fd for fd in itertools.count() if fd not in in_use)
    return _limited(pid, resource.RLIMIT_NOFILE, first_free)


def fill_disk(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """No file grows any more, its log among them."""
    return _limited(cluster.processes[name].pid, resource.RLIMIT_FSIZE, 0)


def kill_grammars(cluster: Cluster, name: str, dice: random.Random) -> Heal:
    """SIGKILL to the process that compiles its grammars, if there was one yet."""
    for pid in proc.children_of(cluster.processes[name].pid, "grammar_server"):
        proc.kill(pid)
    return _nothing


def _limited(pid: int, which: int, soft: int) -> Heal:
    before = proc.limit(pid, which, soft)

    async def heal() -> None:
        proc.limit(pid, which, before)

    return heal


async def _nothing() -> None:
    """It is over already."""


WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "gateway")
RESTART_SECONDS = 12.0


def _kinds() -> list[Kind]:
    kinds = []
    for role in ROLES:
        is_gateway = role == "gateway"
        kinds += [
            Kind(f"kill {role}", kill, role, breaks_connections=is_gateway),
            Kind(f"leave {role}", leave, role, breaks_connections=is_gateway),
            Kind(f"stop {role} shortly", stop, role, SHORT_SECONDS),
            Kind(f"stop {role} for long", stop, role, LONG_SECONDS),
            Kind(f"close sockets of {role}", close_sockets, role, breaks_connections=is_gateway),
            Kind(f"exhaust fds of {role}", exhaust_fds, role, 1.0, breaks_connections=is_gateway),
            Kind(f"fill disk of {role}", fill_disk, role, 1.0),
        ]
    # While others start anew, and want to be paired.
    kinds.append(Kind("exhaust fds of decode for long", exhaust_fds, "decode", RESTART_SECONDS))
    for role in WORKERS:
        kinds.append(Kind(f"kill every {role}", kill, role, takes_all=True))
        kinds.append(Kind(f"kill grammars of {role}", kill_grammars, role))
    return kinds


KINDS = {kind.name: kind for kind in _kinds()}
ALL_KINDS = KINDS | HOST_KINDS
"""Those between hosts need some (`hosts.py`)."""
SHORT_ROUND = (
    ("kill prefill", "kill decode", "exhaust fds of gateway"),
    ("stop prefill for long", "fill disk of decode", "stop gateway shortly"),
    ("exhaust fds of decode", "close sockets of gateway", "kill grammars of prefill"),
    ("kill gateway", "exhaust fds of prefill", "close sockets of decode"),
)
"""Waves of kinds: those of one happen at the same time, to different processes."""
WAVE_MAX = 3


def draw_wave(dice: random.Random, names: Sequence[str]) -> tuple[str, ...]:
    """Of these kinds, some to happen at the same time, no two to the same role: of each, one stays
    unharmed, unless all of it are taken at once."""
    wave: dict[str, str] = {}
    for name in dice.sample(names, min(len(names), dice.randint(1, WAVE_MAX))):
        wave.setdefault(ALL_KINDS[name].role, name)
    return tuple(wave.values())


class Injury(msgspec.Struct, frozen=True):
    """A fault that has happened, and how to undo it."""

    kind: Kind
    name: str
    heal: Heal


def strike(cluster: Cluster, name: str, dice: random.Random) -> list[Injury]:
    """Do what `name` says, to one process of its role or to all."""
    kind = ALL_KINDS[name]
    targets = cluster.names[kind.role]
    if not kind.takes_all:
        targets = [dice.choice(targets)]
    return [Injury(kind, target, kind.inject(cluster, target, dice)) for target in targets]
