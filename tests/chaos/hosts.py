"""A cluster whose processes are on hosts of their own: network namespaces on one switch, where
packets can be lost, and a relay for each, where connections can be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pdrt.cli.torture.network import SWITCH, Network, Way
from pdrt.transfer.cluster_key import write_new_key
from tests.chaos.cluster import Cluster
from tests.chaos.relay import MARK
from tests.e2e.deployment import ROOT

RELAY_PORT = 4999
UPLINK_HOST = 254
"""Of the tests themselves, where the clients are."""


class HostRelay:
    """The relay of one host."""

    def __init__(self, network: Network, host: str) -> None:
        self._popen = subprocess.Popen(
            [*network.command(host), sys.executable, "-m", "tests.chaos.relay", str(RELAY_PORT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        assert self._output.readline() == "up\n"
        network.run(
            *(host, "iptables", "--wait", "--table", "nat", "--append", "OUTPUT"),
            *("--protocol", "tcp", "--destination", f"{network.subnet}.0/24"),
            *("-m", "mark", "!", "--mark", str(MARK)),
            *("--jump", "REDIRECT", "--to-ports", str(RELAY_PORT)),
        )

    def tell(self, command: str) -> None:
        self._input.write(f"{command}\n")
        self._input.flush()
        assert self._output.readline() == "done\n"

    def close(self) -> None:
        self._popen.communicate()


class Hosts(Cluster):
    """Each process on a host of the same name."""

    def __init__(
        self, folder: Path, model: str, workers: int = 2, flags: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, model, workers, flags)
        self.network = Network([name for names in self.names.values() for name in names])
        self.relays: dict[str, HostRelay] = {}
        self.gateway_host = self.network.address("gateway")
        self._key = folder / "cluster.key"
        if not self._key.exists():  # of an earlier run that kept its folder
            write_new_key(str(self._key))

    def __enter__(self) -> Hosts:
        super().__enter__()
        try:
            self.network.__enter__()
            self._make_uplink()
            for names in self.names.values():
                for name in names:
                    self.relays[name] = HostRelay(self.network, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            for relay in self.relays.values():
                relay.close()
            self.network.__exit__()

    def prefix_of(self, name: str) -> list[str]:
        return self.network.command(name)

    def flags_of(self, name: str) -> list[str]:
        address = self.network.address(name)
        # They could see each other's memory, as all of them are on one machine.
        own = ["--worker-host", address] if name == "gateway" else ["--transfer", "tcp"]
        return ["--host", address, "--cluster-key", str(self._key), *own]

    def others(self, name: str) -> list[str]:
        """The hosts that this one has to do with."""
        role = name.partition("-")[0]
        return [n for other, names in self.names.items() if other != role for n in names]

    def cut(self, name: str, ways: Sequence[Way], share: float) -> None:
        """A share of what passes between this host and all that it has to do with."""
        for other in self.others(name):
            self.network.cut(name, other, ways, share)

    def mend(self, name: str, ways: Sequence[Way], share: float) -> None:
        """Undo the same `cut`."""
        for other in self.others(name):
            self.network.mend(name, other, ways, share)

    def _make_uplink(self) -> None:
        """A port of the switch on the machine itself; it goes with the switch."""
        name = f"pdrt{os.getpid()}"
        self.network.run(
            *(SWITCH, "ip", "link", "add", "uplink", "type", "veth"),
            *("peer", "name", name, "netns", str(os.getpid())),
        )
        self.network.run(SWITCH, "ip", "link", "set", "uplink", "master", "bridge", "up")
        address = f"{self.network.subnet}.{UPLINK_HOST}/24"
        for command in (f"address add {address} dev {name}", f"link set {name} up"):
            subprocess.run(["ip", *command.split()], check=True)
