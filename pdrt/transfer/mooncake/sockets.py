"""This process's TCP sockets, found among its file descriptors and told apart by their inodes.

The library opens sockets and tells nobody. Each is looked at through a duplicate of its
descriptor, which stays what it is whatever becomes of the number meanwhile. What says that a
socket is gone is that no descriptor of this process leads to its inode any more.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Collection, Iterator

FDS = "/proc/self/fd"


def listening_ports() -> set[int]:
    """TCP ports that this process listens on.

    Raises:
        OSError: it can open nothing more, and so cannot tell.
    """
    return {_port(each) for each in _tcp_sockets() if _is_listening(each)}


def duplicate_listeners(ports: Collection[int]) -> list[socket.socket]:
    """Whoever listens there, kept by us too: the ports stay taken until these are closed.

    Raises:
        OSError: it can open nothing more.
    """
    return [each.dup() for each in _tcp_sockets() if _is_listening(each) and _port(each) in ports]


def shut_down_sessions(port: int) -> set[int]:
    """Shut down every connection to that port of ours, both ways; their inodes.

    Raises:
        OSError: it can open nothing more, and so cannot tell which there are.
    """
    inodes: set[int] = set()
    for each in _tcp_sockets():
        if not _is_listening(each) and _port(each) == port:
            inodes.add(os.fstat(each.fileno()).st_ino)
            _shut_down(each)
    return inodes


def open_sockets() -> set[int]:
    """Inodes of all sockets that are open in this process.

    Raises:
        OSError: it can open nothing more, and so cannot tell.
    """
    return {status.st_ino for _, status in _descriptors() if stat.S_ISSOCK(status.st_mode)}


def _descriptors() -> Iterator[tuple[int, os.stat_result]]:
    for name in os.listdir(FDS):
        status = _status(int(name))
        if status is not None:
            yield int(name), status


def _status(fd: int) -> os.stat_result | None:
    """None when it has been closed meanwhile."""
    try:
        return os.fstat(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each, closed after its turn."""
    for fd, status in _descriptors():
        if not stat.S_ISSOCK(status.st_mode):
            continue
        duplicate = _duplicate(fd)
        if duplicate is None:
            continue
        with duplicate:
            is_internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and duplicate.type == socket.SOCK_STREAM:
                yield duplicate


def _duplicate(fd: int) -> socket.socket | None:
    """None when it is no socket any more. Too few descriptors is no such answer: it raises."""
    try:
        copy = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(each: socket.socket) -> int:
    port: int = each.getsockname()[1]
    return port


def _shut_down(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        # Its peer has reset it: it reads nothing new, and is waited for like the others.
        if error.errno != errno.ENOTCONN:
            raise
