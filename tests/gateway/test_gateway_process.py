"""The gateway as a process: addresses, signals, a graceful stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdrt.config import GatewayConfig
from pdrt.errors import ConfigError
from pdrt.gateway.served_model import load_served_model
from pdrt.gateway.server import bind_http, serve
from pdrt.model.identity import read_identity
from pdrt.model.tokenizer import Tokenizer
from pdrt.protocol.gateway_messages import FinishReason
from tests.gateway.conftest import HANG_SECONDS, Deployment, eventually
from tests.gateway.stand_in import begins
from tests.model.tiny import make_tiny_model

PROGRAM = """
import json, sys
from pdrt.config import GatewayConfig
from pdrt.gateway.server import run
config = GatewayConfig(
    port=0, worker_port=0, model=sys.argv[1], served_model_name="tiny", shutdown_timeout=20.0
)
sys.exit(run(config, lambda facts: print(json.dumps(facts), flush=True)))
"""


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def process(model_directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(model_directory), stdout=asyncio.subprocess.PIPE
    )
    yield made
    if made.returncode is None:
        made.kill()
        await made.wait()


@pytest.mark.e2e
async def test_sigterm_lets_a_stream_end_and_refuses_new_ones(
    process: asyncio.subprocess.Process, model_directory: Path
) -> None:
    async with asyncio.timeout(6 * HANG_SECONDS):
        assert process.stdout is not None
        announced = json.loads(await process.stdout.readline())
        assert announced["role"] == "gateway" and len(announced["incarnation"]) == 16
        deployment = Deployment(
            announced, Tokenizer(model_directory), read_identity(model_directory).digest
        )
        _, decode = await deployment.pair()
        decode.on_submit = begins(decode, deployment.ids("abc"), 1)
        stream = aiter(await deployment.chat(stream=True))
        await anext(stream)
        process.send_signal(signal.SIGTERM)
        response = await deployment.http.get("/ready")
        while response.status_code == 200:
            response = await deployment.http.get("/ready")
        assert response.json()["reasons"] == ["the gateway is shutting down"]
        refused = await deployment.http.post("/v1/completions", json={})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        request = decode.submits[0].request
        decode.tokens(request, 1, deployment.ids("abc")[1:])
        decode.finish(request, FinishReason.STOP)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert await process.wait() == 0
        await deployment.close()


@pytest.mark.e2e
async def test_a_second_signal_stops_at_once_and_workers_are_told(
    process: asyncio.subprocess.Process, model_directory: Path
) -> None:
    async with asyncio.timeout(6 * HANG_SECONDS):
        assert process.stdout is not None
        deployment = Deployment(
            json.loads(await process.stdout.readline()),
            Tokenizer(model_directory),
            read_identity(model_directory).digest,
        )
        _, decode = await deployment.pair()
        asking = asyncio.create_task(deployment.chat())
        await eventually(lambda: decode.submits, "submitted")
        process.send_signal(signal.SIGINT)
        while (await deployment.http.get("/ready")).status_code == 200:
            pass
        process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="shutting down"):
            await asking
        await eventually(lambda: decode.cancels, "cancelled upstream")
        assert decode.cancels[0].reason == "shutdown"
        assert await process.wait() == 0
        await deployment.close()


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            bind_http("127.0.0.1", port)


async def test_a_worker_port_in_use_is_named_with_its_flag(model_directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = GatewayConfig(port=0, worker_port=port, model=str(model_directory))
        model, digests = load_served_model(config)
        assert len(set(digests)) == 2
        with pytest.raises(ConfigError, match=rf":{port}.*--worker-port"):
            await serve(config, model, digests, lambda facts: None)
        model.close()
