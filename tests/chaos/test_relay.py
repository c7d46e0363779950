"""The relay and the namespaces do to connections what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdrt.cli.torture.network import NAMES, Network, Way
from tests.chaos.hosts import HostRelay, missing

PORT = 5001
SERVER = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("up", flush=True)
    while True:
        peer, _ = server.accept()
        peer.sendall(b"hello")
        try:
            print("end" if not peer.recv(1) else "data", flush=True)
        except ConnectionError:
            print("reset", flush=True)
        peer.close()
"""
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
print(peer.recv(5).decode(), flush=True)
for line in sys.stdin:
    try:
        peer.settimeout(float(line))
        print("end" if not peer.recv(1) else "data", flush=True)
    except TimeoutError:
        print("silence", flush=True)
    except ConnectionError:
        print("reset", flush=True)
"""


class Child:
    """A script on a host."""

    def __init__(self, network: Network, host: str, script: str, *arguments: str) -> None:
        self._popen = subprocess.Popen(
            [*network.command(host), sys.executable, "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{line}\n")
        self._popen.stdin.flush()
        return self.says()

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with Network(["near", "far"]) as network:
        yield network


@pytest.fixture
def far(network: Network) -> Iterator[Child]:
    child = Child(network, "far", SERVER, str(PORT))
    assert child.says() == "up"
    yield child
    child.close()


@pytest.fixture
def relay(network: Network) -> Iterator[HostRelay]:
    relay = HostRelay(network, "near")
    yield relay
    relay.close()


@pytest.fixture
def near(network: Network, far: Child, relay: HostRelay) -> Iterator[Child]:
    child = Child(network, "near", CLIENT, network.address("far"), str(PORT))
    assert child.says() == "hello"
    yield child
    child.close()


def test_a_connection_becomes_half_open(far: Child, near: Child, relay: HostRelay) -> None:
    relay.tell("forget")
    assert far.says() in ("end", "reset")
    assert near.tell("0.2") == "silence"
    relay.tell("tell")
    assert near.tell("60") in ("end", "reset")


def test_ends_are_passed_on(far: Child, near: Child, relay: HostRelay) -> None:
    near.close()
    assert far.says() == "end"


def test_one_way(network: Network, far: Child) -> None:
    """What the far host sends is lost, so the near one's connection never opens."""
    network.cut("far", "near", [Way.OUT])
    address = network.address("far"), PORT
    connect = f"import socket, sys; socket.create_connection({address}, float(sys.argv[1]))"
    script = [*network.command("near"), sys.executable, "-c", connect]
    done = subprocess.run([*script, "0.5"], capture_output=True, text=True, check=False)
    assert "TimeoutError" in done.stderr
    network.mend("far", "near", [Way.OUT])
    assert subprocess.run([*script, "60"], check=False).returncode == 0


def test_nothing_is_left() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)

    def mine() -> list[str]:
        return [name for name in os.listdir(NAMES) if f"-{os.getpid()}-" in name]

    with Network(["near", "far"]):
        assert len(mine()) == 3
    assert not mine()


def test_what_a_killed_process_has_left_is_removed() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    with subprocess.Popen(["true"]) as ended:
        pass
    name = f"pdrt-{ended.pid}-decode-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with Network(["near"]):
        assert name not in os.listdir(NAMES)
