"""Whether a port can be bound, asked before the heavy part of a role starts."""

from __future__ import annotations

import errno
import socket

from pdrt.errors import ConfigError


def check_port(flag: str, host: str, port: int) -> None:
    """Raises `ConfigError` naming flag, host and port if it cannot be bound. 0 always can.

    Another process may still take the port before the role binds it; then the role says so.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, socket.AF_INET, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do it: a port in TIME_WAIT is free, one that is listened on is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"{flag} {port}: address {host!r} is not known here") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with {flag}"
            ) from error
        raise ConfigError(f"{flag} {port} on {host}: {error.strerror}") from error
