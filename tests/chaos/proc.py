"""What the kernel says of a process, and what it lets its parent do to it from outside."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

_PIDFD_GETFD = 438
"""Of Linux on x86-64; Python 3.11 has no name for it."""
_ESTABLISHED = "01"
_libc = ctypes.CDLL(None, use_errno=True)


class BadDescriptor(OSError):
    """It has been closed meanwhile."""


GONE = (BadDescriptor, ConnectionError, ProcessLookupError)
"""What a connection that has ended meanwhile is met with."""


class Use(msgspec.Struct, frozen=True):
    """What a process takes of the machine."""

    fds: int
    threads: int
    anonymous_bytes: int
    """Resident memory of its own; the pool, which is shared, is not in it."""


def read_use(pid: int) -> Use:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Use(
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        anonymous_bytes=1024 * int(status["RssAnon"].split()[0]),
    )


def children_of(pid: int, word: str) -> list[int]:
    """Its children with `word` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _parent(entry) == pid:
                arguments = (entry / "cmdline").read_text()
                found += [int(entry.name)] if word in arguments else []
    return found


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def connections_of(pid: int) -> list[int]:
    """Descriptors of its established TCP connections."""
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry) in inodes:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def _borrowed(pid: int, fd: int) -> Iterator[socket.socket]:
    """The very socket that `fd` is in the process `pid`."""
    handle = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(_PIDFD_GETFD, handle, fd, 0)
    finally:
        os.close(handle)
    if copy < 0:
        error = ctypes.get_errno()
        kind = BadDescriptor if error == errno.EBADF else OSError
        raise kind(error, f"descriptor {fd} of process {pid}")
    with socket.socket(fileno=copy) as borrowed:
        yield borrowed


def end_connection(pid: int, fd: int) -> bool:
    """Both sides read the end of a stream that nobody meant to end. False: it is gone already."""
    try:
        with _borrowed(pid, fd) as borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)
    except GONE:
        return False
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


def reset_connection(pid: int, fd: int) -> bool:
    """Its peer gets a RST, itself an error. False: it is gone already."""
    address = ctypes.create_string_buffer(16)  # a sockaddr of AF_UNSPEC: disconnect
    try:
        with _borrowed(pid, fd) as borrowed:
            return int(_libc.connect(borrowed.fileno(), address, len(address))) == 0
    except GONE:
        return False


def limit(pid: int, which: int, soft: int) -> int:
    """Set a soft limit of a running process; what it was before."""
    before, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, hard))
    return before


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
