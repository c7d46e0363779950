"""Finding this process's sockets, and knowing when they are gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pdrt.transfer.mooncake.sockets import (
    duplicate_listeners,
    listening_ports,
    open_sockets,
    shut_down_sessions,
)
from tests.descriptors import no_more_fds, open_descriptors


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def connection(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("::1", port_of(listener)))
    server, _ = listener.accept()
    return client, server


def inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def test_listeners_are_found(listener: socket.socket) -> None:
    port = port_of(listener)
    assert port in listening_ports()
    listener.close()
    assert port not in listening_ports()


def test_only_connections_to_that_port_are_shut_down(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        client, server = connection(listener)
        other_client = socket.create_connection(other.getsockname())
        other_server, _ = other.accept()
        fds = open_descriptors()
        assert shut_down_sessions(port_of(listener)) == {inode(server)}
        assert open_descriptors() <= fds
        assert client.recv(1) == b"", "this one has been"
        other_client.sendall(b"x")
        assert other_server.recv(1) == b"x", "that one has not"
        # The listener itself goes on.
        again, _ = connection(listener)
        for each in (client, server, other_client, other_server, again, _):
            each.close()


def test_what_has_arrived_is_still_there_to_be_read(listener: socket.socket) -> None:
    """Which is why shutting down is no fence by itself: the reader must be seen to have ended."""
    client, server = connection(listener)
    client.sendall(b"late")
    inodes = shut_down_sessions(port_of(listener))
    assert server.recv(16) == b"late"
    assert server.recv(16) == b""
    assert inodes <= open_sockets()
    server.close()
    assert not inodes & open_sockets()
    client.close()


def test_one_that_its_peer_has_reset(listener: socket.socket) -> None:
    client, server = connection(listener)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert shut_down_sessions(port_of(listener)) == {inode(server)}, "it is waited for all the same"
    server.close()


def test_another_descriptor_keeps_a_socket_open(listener: socket.socket) -> None:
    client, server = connection(listener)
    copy = server.dup()
    server_inode = inode(server)
    server.close()
    assert server_inode in open_sockets()
    copy.close()
    assert server_inode not in open_sockets()
    client.close()


def test_a_duplicate_keeps_a_port_taken(listener: socket.socket) -> None:
    port = port_of(listener)
    (copy,) = duplicate_listeners({port, 1})
    listener.close()
    assert port in listening_ports()
    with socket.socket(socket.AF_INET6) as second, pytest.raises(OSError):
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second.bind(("::1", port))
    copy.close()
    assert port not in listening_ports()


def test_without_descriptors_there_is_no_answer(listener: socket.socket) -> None:
    """An answer that leaves some out would be taken for a fence."""
    client, server = connection(listener)
    with no_more_fds():
        for look in (listening_ports, open_sockets):
            with pytest.raises(OSError):
                look()
        with pytest.raises(OSError):
            shut_down_sessions(port_of(listener))
    client.close()
    server.close()
