"""Processes of a worker's ranks other than its leader: the leader's children, and dead with it.

They are spawned before the leader loads anything, so that what they inherit is a socket and nothing
else, and all of them load at the same time.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from pdrt.transfer.processes import process_of
from pdrt.transfer.worker_loop import ExitCode

log = logging.getLogger(__name__)

EXIT_REFUSED = 2
"""Of a rank that cannot serve as it is configured; it has said why."""


class RankLaunch(msgspec.Struct, frozen=True):
    """How the processes of other ranks are started."""

    command: Callable[[int, int], Sequence[str]]
    """Of a rank, and of the descriptor of its end of the channel."""
    environment: Mapping[str, str]
    inherited: tuple[int, ...]
    """Descriptors that the commands name."""


class RankChild:
    """One of them, from its spawn to its end."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        """`end`: the leader's end of their channel."""
        self.rank = rank
        self.end = end
        self.pid = process.pid
        # Neither can mean another process: nobody but us reaps it.
        self.fd = os.pidfd_open(process.pid)
        self.named = process_of(process.pid)
        """What a peer needs to know to fence it."""
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None while it lives."""
        return self._process.poll()

    def fate(self) -> str | None:
        """How it ended, in words; None while it lives."""
        code = self.exit_code
        if code is None:
            return None
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {_signal_name(-code)}"
        return f"rank {self.rank} (process {self.pid}) {how}"

    def kill(self) -> None:
        """SIGKILL; nothing happens when it is dead already."""
        self._process.kill()

    def reap(self) -> None:
        """Wait until it is gone."""
        self._process.wait()

    def close(self) -> None:
        """Stop watching it."""
        os.close(self.fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def spawn_ranks(launch: RankLaunch, ranks: int) -> list[RankChild]:
    """Start ranks 1 and up.

    To be called on the main thread: its end is what kills them (PR_SET_PDEATHSIG).
    """
    assert threading.current_thread() is threading.main_thread()
    return [_spawn(launch, rank) for rank in range(1, ranks)]


def _spawn(launch: RankLaunch, rank: int) -> RankChild:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            launch.command(rank, theirs.fileno()),
            env=launch.environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *launch.inherited),
        )
    return RankChild(rank, process, ours)


@contextmanager
def watched(children: Sequence[RankChild]) -> Iterator[None]:
    """While the main thread loads: the ranks wait for each other there, so one that ends takes all
    of the worker with it at once, as nobody else could."""
    if not children:
        yield
        return
    stop_reading, stop_writing = os.pipe()
    thread = threading.Thread(
        target=_watch, args=(children, stop_reading), name="rank-watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        os.close(stop_writing)
        thread.join()
        os.close(stop_reading)


def _watch(children: Sequence[RankChild], stop: int) -> None:
    poller = select.poll()
    for fd in (stop, *(child.fd for child in children)):
        poller.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll()}
    if stop in ready:
        return
    child = next(child for child in children if child.fd in ready)
    log.error("worker ends", extra={"why": f"{child.fate()} while it was starting"})
    logging.shutdown()
    is_refused = child.exit_code == EXIT_REFUSED
    os._exit(EXIT_REFUSED if is_refused else ExitCode.CANNOT_GO_ON.value)
