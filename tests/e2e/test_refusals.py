"""Bad input of every kind is refused by name, and harms nobody."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.e2e.deployment import Deployment, run_command, until
from tests.e2e.reference import Reference
from tests.e2e.streams import assert_serves

pytestmark = pytest.mark.e2e

REFUSED = 2


def refused(*arguments: str) -> str:
    """The one line that a command is refused with."""
    code, _, errors = run_command(*arguments)
    lines = errors.strip().splitlines()
    assert code == REFUSED, errors
    assert lines[-1].startswith("pdrt: "), errors
    assert "Traceback" not in errors
    return lines[-1]


@pytest.mark.parametrize("command", ("up", "prefill", "decode", "gateway"))
def test_an_unknown_flag(command: str) -> None:
    assert "did you mean --model" in refused(command, "--modle", "x")


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
@pytest.mark.parametrize("command", ("up", "prefill", "decode"))
def test_a_gpu_that_is_not_there(command: str) -> None:
    assert "--gpus 0: no NVIDIA GPU on this machine; use --device cpu" in refused(
        command, "--gpus", "0"
    )


@pytest.mark.parametrize("command", ("up", "decode", "gateway"))
def test_an_unknown_model(command: str) -> None:
    line = refused(command, "--model", "/no/such/model", "--port", "0")
    assert "/no/such/model" in line and ".gguf" in line


def test_a_broken_gguf(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(random.Random(1).randbytes(4000)))
    assert "broken.gguf" in refused("up", "--model", str(file), "--port", "0")
    assert "cannot read" in refused("up", "--model", str(file), "--port", "0")


def test_an_architecture_that_is_not_served(tmp_path: Path, tiny_model: Path) -> None:
    """Named, with the reason, by every role; `up` ends with it."""
    model = tmp_path / "mamba"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config.update(architectures=["MambaForCausalLM"], model_type="mamba")
    (model / "config.json").write_text(json.dumps(config))
    for command in ("gateway", "decode"):
        line = refused(command, "--model", str(model), "--port", "0")
        assert "MambaForCausalLM is not supported" in line
    code, output, errors = run_command("up", "--model", str(model), "--port", "0")
    assert code == REFUSED
    assert "MambaForCausalLM is not supported" in output + errors


def test_a_port_in_use(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for arguments in (
            ("up", "--port", port),
            ("up", "--port", "0", "--worker-port", port),
            ("gateway", "--port", port),
            ("prefill", "--port", port),
            ("decode", "--metrics-port", port),
            ("decode", "--data-port", port),
        ):
            line = refused(arguments[0], "--model", str(tiny_model), *arguments[1:])
            assert f"port {port} on 127.0.0.1 is in use" in line
            assert f"choose another with {arguments[-2]}" in line


def frames(dice: random.Random) -> Iterator[list[bytes]]:
    """What nobody should send."""
    yield [b""]
    yield [b"\x01"]
    yield [b"\x00" * 100]
    yield [b"\x01" + b"\xc1" * 50]
    yield [b"\x01" + b"\x91" * 20000]
    yield [b"\x01\xdf\xff\xff\xff\xff"]
    yield [b"one", b"two", b"three"]
    yield [b"", b"", b""]
    yield [bytes(17 * 2**20)]
    for _ in range(100):
        yield [b"\x01" + dice.randbytes(dice.randrange(200))]


async def test_malformed_frames(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """On every ZeroMQ port: counted, and nobody else notices."""
    (endpoint,) = [worker["endpoint"] for worker in tiny_up.workers("prefill")]
    before = rejected(tiny_up)
    for role, address in (
        ("prefill", endpoint),
        ("gateway", f"tcp://127.0.0.1:{tiny_up.worker_port}"),
    ):
        sent = 0
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 5000)
            dealer.connect(address)
            for parts in frames(random.Random(5)):
                dealer.send_multipart(parts)
                sent += 1
            await until(
                lambda role=role: rejected(tiny_up).get(role, 0) >= before.get(role, 0) + 100,
                f"{role} to count them",
            )
        with socket.create_connection(address.removeprefix("tcp://").split(":")) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    await assert_serves(tiny_up, tiny_reference)
    assert tiny_up.is_ready()


def rejected(deployment: Deployment) -> dict[str, float]:
    return {
        role: deployment.metric("pdrt_rejected_frames_total", role=role)
        for role in ("prefill", "decode", "gateway")
    }
