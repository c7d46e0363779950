"""A real gateway on loopback, stand-in workers, and the official client."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from pdrt.config import ApiConfig, GatewayConfig, ProtocolConfig
from pdrt.gateway.served_model import ServedModel
from pdrt.gateway.server import serve
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from pdrt.protocol.gateway_messages import Role
from tests.gateway.stand_in import StandIn
from tests.model.tiny import EOS_ID, make_tokenizer

HANG_SECONDS = 120.0
"""Nothing here takes a second; a test that waits longer than this hangs."""
PREFILL_ENDPOINT = "tcp://127.0.0.1:7001"
KEY = "secret-key"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return Tokenizer(directory)


async def eventually(is_true: Callable[[], object], what: str) -> None:
    """Wait for something that must come."""
    for _ in range(int(HANG_SECONDS / 0.01)):
        if is_true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


class Deployment:
    """A gateway, its workers, its clients."""

    def __init__(self, announced: dict[str, Any], tokenizer: Tokenizer, digest: str = "d1") -> None:
        self.digest = digest
        self.url: str = announced["http"]
        self.workers_address: str = announced["workers"]
        self.tokenizer = tokenizer
        self.stand_ins: list[StandIn] = []
        self.http = httpx2.AsyncClient(
            base_url=self.url, trust_env=False, timeout=HANG_SECONDS, headers=_auth(KEY)
        )
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=KEY,
            max_retries=0,
            timeout=HANG_SECONDS,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stand_in(self, role: Role, digest: str | None = None) -> StandIn:
        is_prefill = role is Role.PREFILL
        worker = StandIn(
            role,
            self.workers_address,
            digest or self.digest,
            PREFILL_ENDPOINT if is_prefill else None,
        )
        if not is_prefill:
            worker.register = msgspec.structs.replace(worker.register, paired=(PREFILL_ENDPOINT,))
        self.stand_ins.append(worker)
        return worker

    async def pair(self) -> tuple[StandIn, StandIn]:
        """A prefill and a decode worker that are ready to serve."""
        prefill, decode = self.stand_in(Role.PREFILL), self.stand_in(Role.DECODE)
        await self.until_ready()
        return prefill, decode

    async def until_ready(self) -> None:
        for _ in range(int(HANG_SECONDS / 0.01)):
            if (await self.http.get("/ready")).status_code == 200:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("never ready")

    async def until_unready(self, reason: str) -> None:
        for _ in range(int(HANG_SECONDS / 0.01)):
            answer = await self.http.get("/ready")
            if answer.status_code == 503 and answer.json()["reasons"] == [reason]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"always ready, or not because {reason}")

    async def heard(self, worker: StandIn) -> None:
        """All that it has said has been taken, and all that it was told by then is here."""
        worker.say()
        seq = worker.register.seq
        await eventually(lambda: worker.registered and worker.registered[-1].seq >= seq, "heard")

    async def known(self, worker: StandIn) -> None:
        await eventually(lambda: worker.registered, "registered")

    async def chat(self, text: str = "hi", **fields: Any) -> Any:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return await self.client.chat.completions.create(model="tiny", messages=messages, **fields)

    async def close(self) -> None:
        for worker in self.stand_ins:
            worker.die()
        await self.http.aclose()
        await self.client.close()


def _auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


Deploy = Callable[..., Any]


@pytest.fixture
def deploy(tokenizer: Tokenizer) -> Iterator[Deploy]:
    """`async with deploy(**GatewayConfig fields) as deployment`. At its end every client must
    have been answered, every attempt must be gone, and the gateway's invariants must hold."""

    @asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[Deployment]:
        max_model_len = fields.pop("max_model_len", 512)
        used: Tokenizer = fields.pop("tokenizer", tokenizer)
        api = ApiConfig(**fields.pop("api", {}))
        # All live on one loop: when it stands still, nobody is silent.
        times = {"silence_seconds": 0.5, "tick_late_seconds": 0.2}
        protocol = ProtocolConfig(**times | fields.pop("protocol", {}))
        config = GatewayConfig(
            port=0, worker_port=0, shutdown_timeout=0.2, protocol=protocol, api=api, **fields
        )
        identity = ModelIdentity(
            "tiny", "d1", max_model_len, tokenizer.vocab_size, (EOS_ID,), "LlamaForCausalLM"
        )
        announced: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        model = ServedModel(identity, "tiny", used, api)
        task = asyncio.create_task(serve(config, model, ("d1",), announced.set_result))
        try:
            await asyncio.wait({task, announced}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            deployment = Deployment(announced.result(), used)
            try:
                yield deployment
                await _check(deployment)
            finally:
                await deployment.close()
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=HANG_SECONDS)
            assert task.cancelled(), "the gateway failed, or hangs"

    yield start


@contextmanager
def own_seconds() -> Iterator[Callable[[], float]]:
    """Processor time of this thread alone so far: not of other tests' threads, nor of the garbage
    collector, which goes through all that other tests have left."""
    began = time.thread_time()
    gc.disable()
    try:
        yield lambda: time.thread_time() - began
    finally:
        gc.enable()


async def _check(deployment: Deployment) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            gateway = (await deployment.http.get("/status")).json()["gateway"]
            if gateway["requests"] == gateway["attempts"] == 0:
                break
            await asyncio.sleep(0.01)
    check = (await deployment.http.get("/debug/check")).json()
    assert check["gateway"]["broken"] == []


@pytest.fixture
async def deployment(deploy: Deploy) -> AsyncIterator[Deployment]:
    async with asyncio.timeout(3 * HANG_SECONDS), deploy(api={"api_key": (KEY,)}) as made:
        yield made
