"""A whole gateway, asked without sockets, whose workers answer at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.types import Message

from pdrt.config import GatewayConfig, ProtocolConfig
from pdrt.gateway.app import build_app
from pdrt.gateway.hub import Hub
from pdrt.gateway.served_model import ServedModel
from pdrt.ids import routing_id
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Finished,
    FinishReason,
    GatewayToWorker,
    Inspect,
    PromptLogprobs,
    Report,
    Submit,
    Tokens,
    Usage,
)
from tests.gateway.stand_in import asked, scored
from tests.gateway.workers import GATEWAY, decode, prefill
from tests.model.templates import TEMPLATES
from tests.model.tiny import EOS_ID, make_tokenizer

MAX_MODEL_LEN = 1024
OUTPUT = (5, 6, 7)
HANG_SECONDS = 120.0
Answer = tuple[int, dict[str, str], bytes]


class Gateway:
    """The whole application, asked without sockets; its workers answer at once."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.config = GatewayConfig(protocol=ProtocolConfig(silence_seconds=1e8))
        tokenizer = Tokenizer(directory)
        identity = ModelIdentity(
            "tiny", "d1", MAX_MODEL_LEN, tokenizer.vocab_size, (EOS_ID,), "LlamaForCausalLM"
        )
        self.model = ServedModel(identity, "tiny", tokenizer, self.config.api)
        self.hub = Hub(self.config, ("d1",), GATEWAY, self._send)
        self.app = build_app(self.hub, self.model, self.config)
        self._decoder: Decoder[GatewayToWorker] = Decoder(GatewayToWorker, 1 << 24)
        for register in (prefill(1), decode(2, pairs=(1,))):
            self.hub.on_frame(routing_id(register.worker), encode(register))

    def _send(self, peer: bytes, frame: bytes) -> bool:
        self._loop.call_soon(self._work, peer, self._decoder.decode(frame))
        return True

    def _work(self, peer: bytes, message: GatewayToWorker) -> None:
        match message:
            case Submit():
                for answer in answers(message):
                    self.hub.on_frame(peer, encode(answer))
            case Inspect(worker, serial):
                self.hub.on_frame(peer, encode(Report(worker, serial, b"", b"{}")))
            case Cancel(request, worker):
                end = Finished(request, worker, FinishReason.CANCELLED)
                self.hub.on_frame(peer, encode(end))

    async def ask(
        self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> Answer:
        given = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[Message] = []

        async def receive() -> Message:
            if (first := next(given, None)) is not None:
                return first
            await asyncio.Event().wait()  # the client waits for its answer
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode("utf-8", "replace"),
            "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        async with asyncio.timeout(HANG_SECONDS):
            await self.app(scope, receive, send)
        start, *rest = sent
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], names, b"".join(message.get("body", b"") for message in rest)


def answers(submit: Submit) -> Iterator[PromptLogprobs | Tokens | Finished]:
    """What a worker makes of any request."""
    request, worker, sampling = submit.request, submit.worker, submit.sampling
    top = sampling.prompt_logprobs
    if top is not None:
        scores = tuple(scored(token, top) for token in submit.token_ids[1:])
        yield PromptLogprobs(request, worker, scores)
    output = OUTPUT[: sampling.max_tokens]
    if output:
        yield Tokens(request, worker, 0, output, 0, **asked(submit, output))
    usage = Usage(len(submit.token_ids), len(output))
    reason = FinishReason.STOP if len(output) == len(OUTPUT) else FinishReason.LENGTH
    yield Finished(request, worker, reason, usage)


Kind = TypeVar("Kind", bound=Gateway)


def serve(
    kind: type[Kind], runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kind]:
    """Yields one, made on the runner's loop."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES["hermes"]
    tokenizer.save_pretrained(directory)

    async def make() -> Kind:
        return kind(directory)

    made = runner.run(make())
    yield made
    made.model.close()


def as_json(tree: Any) -> bytes:
    """As Python writes it: NaN, infinities and lone surrogates included."""
    return json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")
