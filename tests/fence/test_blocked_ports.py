"""A data port that a firewall between two hosts blocks: named by the host that dials, and what to
open. The hosts are network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from pdrt.cli.torture.network import Network, missing
from tests.e2e.deployment import ROOT

PORT = 8300
LISTEN = f"""
import socket, sys
listener = socket.create_server((sys.argv[1], {PORT}))
print("up", flush=True)
while True:
    listener.accept()[0].close()
"""
DIAL = f"""
import sys
from pdrt.errors import EngineError
from pdrt.transfer.tcp.connection import Address, dial
from pdrt.transfer.tcp.wire import Greeting
greeting = Greeting(bytes(16), segment=1, decode=1, rank=2, generation=1)
print("up", flush=True)
for line in sys.stdin:
    try:
        dial(Address(sys.argv[1], {PORT}, greeting))
    except EngineError as error:
        print(error, flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with Network(["decode", "prefill"]) as network:
        yield network


class Script:
    """A process on one of the hosts, told the address of the other; answers with lines."""

    def __init__(self, network: Network, host: str, text: str) -> None:
        self.process = subprocess.Popen(
            [*network.command(host), sys.executable, "-c", text, network.address("decode")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.read() == "up\n"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_what_to_open_is_said(network: Network) -> None:
    decode, prefill = network.address("decode"), network.address("prefill")
    blocked = (
        f"decode rank 2 at {decode}:{PORT} cannot be reached from {prefill}: {{why}}; "
        f"open TCP port {PORT} there to {prefill}"
    )
    rule = ["INPUT", "--protocol", "tcp", "--dport", str(PORT), "--jump"]
    with (
        closing(Script(network, "decode", LISTEN)),
        closing(Script(network, "prefill", DIAL)) as dialler,
    ):
        for target, why in (("DROP", "no answer within 5 s"), ("REJECT", "Connection refused")):
            network.run("decode", "iptables", "--wait", "--append", *rule, target)
            assert blocked.format(why=why) in dialler.ask()
            network.run("decode", "iptables", "--wait", "--delete", *rule, target)
            assert "does not speak the tcp engine's protocol" in dialler.ask(), "it is reached"
