"""Where the parties of a trial run: on this host, in network namespaces, or where a command such as
`ssh` takes them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from pdrt.cli.torture.network import Network

LOOPBACK = "127.0.0.1"
PDRT = (sys.executable, "-m", "pdrt")
HOSTS = ("target", "victim", "neighbour")


class Places:
    """All on this host, without a network between them."""

    no_network: str | None = "there is no network between the processes"
    """Why packets cannot be dropped; None where they can."""

    def __init__(self, why: str) -> None:
        self.no_network = why

    def command(self, name: str) -> Sequence[str]:
        """What runs pdrt there."""
        return PDRT

    def address(self, name: str) -> str:
        return LOOPBACK

    def cut(self, name: str) -> None:
        """No packet passes between this party and the target any more."""
        raise AssertionError(self.no_network)

    def mend(self, name: str) -> None:
        """They do again."""
        raise AssertionError(self.no_network)


class NamespacePlaces(Places):
    """Each on a host of its own, which is a network namespace."""

    no_network = None

    def __init__(self, network: Network) -> None:
        self._network = network

    def command(self, name: str) -> Sequence[str]:
        return (*self._network.command(name), *PDRT)

    def address(self, name: str) -> str:
        return self._network.address(name)

    def cut(self, name: str) -> None:
        self._network.cut("target", name)

    def mend(self, name: str) -> None:
        self._network.mend("target", name)


class RemotePlaces(Places):
    """The target here, the writers where a command takes them."""

    no_network = "packets are dropped between namespaces of one host only"

    def __init__(self, writer_via: str, writer_host: str, target_host: str) -> None:
        self._writer = tuple(shlex.split(writer_via))
        self._writer_host = writer_host
        self._target_host = target_host

    def command(self, name: str) -> Sequence[str]:
        return PDRT if name == "target" else self._writer

    def address(self, name: str) -> str:
        return self._target_host if name == "target" else self._writer_host
