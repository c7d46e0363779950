"""An exception that nothing handles ends the gateway: half-done effects leave clients waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdrt.config import GatewayConfig
from pdrt.gateway import server
from pdrt.gateway.hub import Hub
from pdrt.gateway.served_model import ServedModel
from pdrt.gateway.server import EXIT_BROKEN, serve
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from pdrt.observe.http_server import HttpServer
from pdrt.protocol.gateway_messages import Role
from tests.gateway.conftest import HANG_SECONDS, Deployment, eventually

Started = tuple[Deployment, "asyncio.Task[int]"]


async def start(tokenizer: Tokenizer) -> Started:
    identity = ModelIdentity("tiny", "d1", 512, tokenizer.vocab_size, (), "LlamaForCausalLM")
    model = ServedModel(identity, "tiny", tokenizer)
    announced: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    config = GatewayConfig(port=0, worker_port=0)
    task = asyncio.create_task(serve(config, model, ("d1",), announced.set_result))
    return Deployment(await announced, tokenizer), task


def breaks(*arguments: Any) -> None:
    raise KeyError("a bug")


@pytest.mark.parametrize("method", ["on_frame", "on_tick"])
async def test_a_bug_in_the_core_ends_the_gateway(
    method: str,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        deployment, serving = await start(tokenizer)
        await deployment.pair()
        monkeypatch.setattr(Hub, method, breaks)
        assert await serving == EXIT_BROKEN
        assert "gateway broke" in caplog.text and "a bug" in caplog.text
        await deployment.close()


@pytest.mark.parametrize("task", ["http", "tick"])
@pytest.mark.parametrize("end", ["returns", "is cancelled from within"])
async def test_so_does_a_task_that_ends_without_a_word(
    task: str,
    end: str,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_end = asyncio.Event()

    async def ends(*arguments: Any, **options: Any) -> None:
        await may_end.wait()
        if end != "returns":
            raise asyncio.CancelledError

    original = HttpServer.serve

    async def serves(http: HttpServer, sockets: Any) -> None:
        """Until it may end."""
        running = asyncio.ensure_future(original(http, sockets))
        await may_end.wait()
        running.cancel()
        await ends()

    if task == "http":
        monkeypatch.setattr(HttpServer, "serve", serves)
    else:
        monkeypatch.setattr(server, "_tick", ends)
    async with asyncio.timeout(HANG_SECONDS):
        deployment, serving = await start(tokenizer)
        may_end.set()
        assert await serving == EXIT_BROKEN
        assert f"the task '{task}' has ended by itself" in caplog.text
        await deployment.close()


@pytest.mark.parametrize(
    "context",
    [
        {"message": "a client's host is gone", "exception": TimeoutError(110, "timed out")},
        {"message": "protocol.data_received() failed", "exception": KeyError(), "transport": None},
        {"message": "Task was destroyed but it is pending!"},
    ],
    ids=["os_error", "connection", "no_exception"],
)
async def test_what_befalls_one_connection_does_not(
    context: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        deployment, serving = await start(tokenizer)
        asyncio.get_running_loop().call_exception_handler(context)
        decode = deployment.stand_in(Role.DECODE)
        await eventually(lambda: decode.registered, "still served")
        assert not serving.done()
        serving.cancel()
        await asyncio.wait([serving])
        await deployment.close()
