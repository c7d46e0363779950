"""The floor of an engine over TCP: the same runs through bare sockets from Python, into place, with
an acknowledgement per connection. A thread per connection on both sides."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

HOST = "127.0.0.1"
ACK = b"\1"
HEADER_BYTES = 16
"""How many runs follow, and how long each is, in decimal."""


def listen() -> socket.socket:
    return socket.create_server((HOST, 0))


def dial(port: int, connections: int) -> list[socket.socket]:
    """Without Nagle's wait for more."""
    found = []
    for _ in range(connections):
        connection = socket.create_connection((HOST, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.append(connection)
    return found


class Sending:
    """The sending end: `memory` holds the runs, one behind the other."""

    def __init__(self, port: int, connections: int, memory: memoryview) -> None:
        self._connections = dial(port, connections)
        self._threads = ThreadPoolExecutor(connections)
        self._memory = memory

    def send(self, run_bytes: int, runs: int) -> None:
        """Return with the last acknowledgement. Connection n carries every n-th run."""
        count = len(self._connections)
        shares = [range(n, runs, count) for n in range(count)]
        list(self._threads.map(self._send, self._connections, shares, [run_bytes] * count))

    def _send(self, connection: socket.socket, share: Sequence[int], run_bytes: int) -> None:
        header = f"{len(share):>7} {run_bytes:>8}".encode()
        assert len(header) == HEADER_BYTES
        connection.sendall(header)
        for run in share:
            connection.sendall(self._memory[run * run_bytes : (run + 1) * run_bytes])
        assert connection.recv(1) == ACK


def receive(listener: socket.socket, memory: memoryview, connections: int) -> None:
    """Serve so many connections until they end. Each has a stripe of `memory` to itself."""
    stripe = len(memory) // connections
    with ThreadPoolExecutor(connections) as threads:
        accepted = [listener.accept()[0] for _ in range(connections)]
        stripes = [memory[n * stripe : (n + 1) * stripe] for n in range(connections)]
        list(threads.map(_receive, accepted, stripes))


def _receive(connection: socket.socket, memory: memoryview) -> None:
    with connection:
        while header := connection.recv(HEADER_BYTES, socket.MSG_WAITALL):
            runs, run_bytes = map(int, header.split())
            for run in range(runs):
                begin = run * run_bytes % (len(memory) - run_bytes + 1)
                connection.recv_into(memory[begin:], run_bytes, socket.MSG_WAITALL)
            connection.sendall(ACK)
