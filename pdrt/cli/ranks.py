"""A worker of several ranks: its leader starts the others, with its own settings.

The settings go to them as a file in memory, and so does the file through which their collectives
find each other: nothing is left behind on disk, and nobody but this user can open either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from pdrt.cli.deployment import child_environment
from pdrt.cli.load import dump_toml
from pdrt.config import WorkerConfig
from pdrt.transfer.rank_children import RankChild, RankLaunch, spawn_ranks


class Ranks(msgspec.Struct, frozen=True):
    """A worker's other ranks, as its leader has started them."""

    children: tuple[RankChild, ...]
    rendezvous: str
    """Path of a file through which ranks find each other; empty at first."""


def start_ranks(role: str, config: WorkerConfig, ranks: int) -> Ranks:
    """Start all ranks of this worker but the leader, which calls this before it loads anything."""
    if ranks == 1:
        return Ranks((), "")
    settings = os.memfd_create("pdrt-ranks")
    os.write(settings, dump_toml(config).encode())
    # Stays open: it is there as long as the leader is.
    meeting = os.memfd_create("pdrt-rendezvous")
    rendezvous = f"/proc/{os.getpid()}/fd/{meeting}"
    common = [sys.executable, "-m", "pdrt", role, "--config", f"/proc/self/fd/{settings}"]
    common += ["--parent-pid", str(os.getpid())]

    def command(rank: int, channel_fd: int) -> Sequence[str]:
        return [*common, "--rank", str(rank), str(channel_fd), rendezvous]

    launch = RankLaunch(command, child_environment(), (settings,))
    children = spawn_ranks(launch, ranks)
    os.close(settings)
    return Ranks(tuple(children), rendezvous)
