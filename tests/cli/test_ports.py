"""Ports that `pdrt up` holds for its children: theirs to listen on, nobody else's by chance."""

from __future__ import annotations

import socket

import pytest
import zmq

from pdrt.cli.ports import check_port, port_of, reserve_port
from pdrt.errors import ConfigError
from pdrt.gateway.server import bind_http

LOOPBACK = "127.0.0.1"


def test_a_reserved_port_can_be_listened_on_again_and_again() -> None:
    with reserve_port("--port", LOOPBACK, 0) as reserved:
        port = port_of(reserved)
        for _ in range(2):
            check_port("--port", LOOPBACK, port)
            with bind_http(LOOPBACK, port) as listener:
                listener.listen()
                with pytest.raises(ConfigError, match=f"port {port} on {LOOPBACK} is in use"):
                    reserve_port("--port", LOOPBACK, port)
                with socket.create_connection((LOOPBACK, port)):
                    pass


def test_the_workers_channel_can_be_bound_to_it_too() -> None:
    with reserve_port("--worker-port", LOOPBACK, 0) as reserved:
        for _ in range(2):
            # The end of a context waits until its sockets are closed indeed.
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://{LOOPBACK}:{port_of(reserved)}")


def test_nobody_else_takes_a_reserved_port_by_chance() -> None:
    """Who asks for any port, or does not expect to share one, binds without SO_REUSEADDR."""
    with (
        reserve_port("--port", LOOPBACK, 0) as reserved,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind((LOOPBACK, port_of(reserved)))


def test_a_port_is_free_again_after_it() -> None:
    with reserve_port("--port", LOOPBACK, 0) as reserved:
        port = port_of(reserved)
    with socket.socket() as other:
        other.bind((LOOPBACK, port))
