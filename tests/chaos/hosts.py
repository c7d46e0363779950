"""A cluster whose processes are on hosts of their own: network namespaces on one switch, where
packets can be lost, and a relay for each, where connections can be."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pdrt.cli.torture.network import SWITCH, Network, Way, run_here
from pdrt.cli.torture.network import missing as missing_namespaces
from pdrt.errors import PdrtError
from pdrt.transfer.cluster_key import write_new_key
from tests.chaos.cluster import Cluster
from tests.chaos.relay import MARK
from tests.e2e.deployment import ROOT

RELAY_PORT = 4999
UPLINK_HOST = 254
"""Of the tests themselves, where the clients are."""


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts with relays here, by trying; None when there can."""
    if (why := missing_namespaces()) is not None:
        return why
    try:
        with Network(["probe"]) as network:
            network.cut("probe", "probe", share=0.5)
            redirect(network, "probe")
            make_uplink(network)
    except PdrtError as error:
        return f"this machine refuses: {error}"
    return None


def redirect(network: Network, host: str) -> None:
    """Connections of this host to others go to its relay, whose own go out. Raises PdrtError."""
    network.run(
        *(host, "iptables", "--wait", "--table", "nat", "--append", "OUTPUT"),
        *("--protocol", "tcp", "--destination", f"{network.subnet}.0/24"),
        *("-m", "mark", "!", "--mark", str(MARK)),
        *("--jump", "REDIRECT", "--to-ports", str(RELAY_PORT)),
    )


def make_uplink(network: Network) -> None:
    """A port of the switch on the machine itself; it goes with the switch. Raises PdrtError."""
    name = f"pdrt{os.getpid()}"
    network.run(
        *(SWITCH, "ip", "link", "add", "uplink", "type", "veth"),
        *("peer", "name", name, "netns", str(os.getpid())),
    )
    network.run(SWITCH, "ip", "link", "set", "uplink", "master", "bridge", "up")
    run_here("ip", "address", "add", f"{network.subnet}.{UPLINK_HOST}/24", "dev", name)
    run_here("ip", "link", "set", name, "up")


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
        redirect(network, host)

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
            make_uplink(self.network)
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
