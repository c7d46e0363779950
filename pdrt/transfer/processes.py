"""Processes of this host, told apart for certain: start times, PID namespaces, pidfds."""

from __future__ import annotations

import errno
import os
import select
import signal

from pdrt.errors import PeerRefused
from pdrt.protocol.messages import RankProcess

_START_TIME_FIELD = 22
"""Of /proc/PID/stat, counted from 1; clock ticks since boot."""
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Of this process or machine: they say nothing about what was to be opened, and pass."""


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold anything: count from its end.
    after_name = stat[stat.rindex(b")") + 2 :].split()
    return int(after_name[_START_TIME_FIELD - 3])


def pid_namespace() -> int:
    """Inode of our PID namespace: a pid means nothing in another one."""
    return os.stat("/proc/self/ns/pid").st_ino


def this_process() -> RankProcess:
    """What a peer needs to know to fence us."""
    return process_of(os.getpid())


def process_of(pid: int) -> RankProcess:
    """The same of a child of ours that has not been reaped."""
    started = start_time(pid)
    assert started is not None, pid
    return RankProcess(pid=pid, start_time=started, pid_namespace=pid_namespace())


class ProcessHandle:
    """A pidfd of exactly the process that a peer named: it stays that one, dead or alive."""

    def __init__(self, process: RankProcess) -> None:
        """Open and verify.

        Raises:
            PeerRefused: it is gone, another process has its pid, or it lives in another PID
                namespace.
            OSError: this process can open nothing more, for now.
        """
        if process.pid_namespace != pid_namespace():
            raise PeerRefused(
                f"process {process.pid} is in another PID namespace "
                f"({process.pid_namespace} != {pid_namespace()}): the local engine cannot fence "
                "it; run both workers in one (docker: --pid) or use another engine"
            )
        self.pid = process.pid
        try:
            self.fd = os.pidfd_open(process.pid)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            raise PeerRefused(f"process {process.pid} cannot be opened: {error}") from error
        # Verified after opening: from here on the pidfd cannot come to mean another process.
        try:
            found = start_time(process.pid)
        except OSError:
            self.close()
            raise
        if found != process.start_time:
            self.close()
            raise PeerRefused(
                f"process {process.pid} is another one by now (started at {found}, "
                f"not {process.start_time})"
            )

    def is_dead(self) -> bool:
        """The process and all its threads are gone."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def kill(self) -> None:
        """SIGKILL. Nothing happens when it is dead already.

        Raises:
            PermissionError: it belongs to somebody else.
        """
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        os.close(self.fd)
