"""Blocking sockets as both sides of the `tcp` engine use them, each by one thread at a time.

Timeouts are the kernel's (SO_SNDTIMEO, SO_RCVTIMEO): Python's own would poll before every call. A
process that was stopped begins them anew when it goes on, as such calls are interrupted by that.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

KEEPALIVE_SECONDS = 30
KEEPALIVE_INTERVAL_SECONDS = 10
KEEPALIVE_PROBES = 3
"""A peer whose host is gone is noticed after a minute, where nothing is being sent."""


def source_address(host: str) -> str:
    """Of this machine's addresses the one from which `host` is reached.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def prepare(connection: socket.socket) -> None:
    """Options of a connection that carries KV."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def limit(connection: socket.socket, seconds: float) -> None:
    """Calls that make no progress for so long fail with BlockingIOError; 0: never."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


def shut_down(connection: socket.socket) -> None:
    """From another thread than its own, whose calls on it end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


def send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Raises OSError, BlockingIOError among them."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        left = _after(left, connection.sendmsg(left))


def receive_all(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Fill all of them.

    Raises:
        ConnectionError: the peer has hung up before.
        OSError: BlockingIOError among them.
    """
    left = [buffer for buffer in buffers if buffer]
    while left:
        received = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionResetError("the peer has hung up")
        left = _after(left, received)


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    """Raises what `receive_all` raises."""
    data = bytearray(size_bytes)
    receive_all(connection, [memoryview(data)])
    return data


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
