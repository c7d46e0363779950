"""Hosts on one machine: network namespaces on a switch of their own, and iptables between them.

Nothing of the machine's own network is touched. For root only; `missing` says why not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from pdrt.errors import PdrtError

NAMES = Path("/run/netns")
PREFIX = "pdrt"
SUBNET = "10.213"
"""Of which each network takes a part; the machine's routes do not know it."""
SWITCH = "switch"
TOOLS = {"ip": "iproute2", "iptables": "iptables"}
"""Commands, and their Debian packages."""
SECONDS_MAX = 30.0


class Way(Enum):
    """Which packets between two hosts are dropped, as the first one sees it."""

    IN = "INPUT"
    OUT = "OUTPUT"


def missing() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces are for root"
    lacking = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    try:
        with Network(["probe"]) as network:
            network.cut("probe", "probe")
    except PdrtError as error:
        return f"this machine refuses: {error}"
    return None


class Network:
    """As a context; what it made is gone when it is left."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._prefix = f"{PREFIX}-{os.getpid()}-"
        self.subnet = f"{SUBNET}.{os.getpid() % 256}"

    def __enter__(self) -> Network:
        """Raises PdrtError where the machine refuses."""
        _remove_orphans()
        try:
            self._make_switch()
            for host in self._hosts:
                self._make_host(host)
        except PdrtError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The links go with their namespaces.
        for host in (*self._hosts, SWITCH):
            with contextlib.suppress(PdrtError):
                run_here("ip", "netns", "delete", self._name(host))

    def address(self, host: str) -> str:
        return f"{self.subnet}.{1 + self._hosts.index(host)}"

    def command(self, host: str) -> list[str]:
        """What runs a command there; it keeps its process id."""
        return ["ip", "netns", "exec", self._name(host)]

    def cut(self, host: str, peer: str, ways: Sequence[Way] = tuple(Way), share: float = 1) -> None:
        """`host` drops packets from and to `peer`: all, or a share of them by chance."""
        for way in ways:
            self._iptables(host, "--append", way, peer, share)

    def mend(
        self, host: str, peer: str, ways: Sequence[Way] = tuple(Way), share: float = 1
    ) -> None:
        """Undo the same `cut`."""
        for way in ways:
            self._iptables(host, "--delete", way, peer, share)

    def _iptables(self, host: str, action: str, way: Way, peer: str, share: float) -> None:
        end = "--source" if way is Way.IN else "--destination"
        by_chance = ["-m", "statistic", "--mode", "random", "--probability", f"{share}"]
        match = [end, self.address(peer), *(by_chance if share < 1 else [])]
        self.run(host, "iptables", "--wait", action, way.value, *match, "--jump", "DROP")

    def run(self, host: str, *command: str) -> None:
        """Raises PdrtError."""
        run_here(*self.command(host), *command)

    def _name(self, host: str) -> str:
        return self._prefix + host

    def _make_switch(self) -> None:
        run_here("ip", "netns", "add", self._name(SWITCH))
        self.run(SWITCH, "ip", "link", "add", "bridge", "type", "bridge")
        self.run(SWITCH, "ip", "link", "set", "bridge", "up")

    def _make_host(self, host: str) -> None:
        port = f"port{self._hosts.index(host)}"
        run_here("ip", "netns", "add", self._name(host))
        self.run(
            *(SWITCH, "ip", "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", self._name(host)),
        )
        self.run(SWITCH, "ip", "link", "set", port, "master", "bridge", "up")
        self.run(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self.run(host, "ip", "link", "set", "eth0", "up")
        self.run(host, "ip", "link", "set", "lo", "up")


def _remove_orphans() -> None:
    """Namespaces of a process that was killed before it could remove them."""
    if not NAMES.is_dir():
        return
    for name in os.listdir(NAMES):
        match name.split("-"):
            case [prefix, pid, *_] if prefix == PREFIX and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(PdrtError):
                    run_here("ip", "netns", "delete", name)


def run_here(*command: str) -> None:
    """On this machine itself. Raises PdrtError."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PdrtError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise PdrtError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
