"""Ports, taken before the heavy part of a role starts."""

from __future__ import annotations

import errno
import socket
from typing import Any

from pdrt.errors import ConfigError


def check_port(flag: str, host: str, port: int) -> None:
    """Raises `ConfigError` naming flag, host and port if it cannot be bound. 0 always can.

    Another process may still take the port before the role binds it; then the role says so.
    """
    reserve_port(flag, host, port).close()


def reserve_port(flag: str, host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen. For as long as it is open, nobody is given its
    port for want of another, while a server that names it can bind it and listen.

    Raises:
        ConfigError: it cannot be bound; names flag, host and port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, socket.AF_INET, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return _bound(socket.socket(family, kind, protocol), address)
    except socket.gaierror as error:
        raise ConfigError(f"{flag} {port}: address {host!r} is not known here") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag}"
            ) from error
        raise ConfigError(f"{flag} {port} on {host}: {error.strerror}") from error


def _bound(unbound: socket.socket, address: Any) -> socket.socket:
    try:
        # As servers do it: a port in TIME_WAIT is free, one that is listened on is not.
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unbound.bind(address)
    except OSError:
        unbound.close()
        raise
    return unbound


def port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port
