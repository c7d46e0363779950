"""One answer, however large, gives others their turn."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message

from pdrt.config import GatewayConfig
from pdrt.gateway import answer as answer_module
from pdrt.gateway import prefix_index
from pdrt.gateway.answer import Answer, Job
from pdrt.gateway.chat.deltas import Delta, ToolCallArguments, ToolCallStart
from pdrt.gateway.chat_format import ChatWhole
from pdrt.gateway.choice import Choice, Plan
from pdrt.gateway.completion_format import CompletionEvents, CompletionWhole
from pdrt.gateway.effects import Submission
from pdrt.gateway.errors import ApiError
from pdrt.gateway.hub import Hub
from pdrt.gateway.logprobs import TokenNames
from pdrt.gateway.responses import Head, Piece, Renderer
from pdrt.gateway.schema.generation import Shown
from pdrt.gateway.text import TextAssembler
from pdrt.ids import routing_id
from pdrt.kv.prefix import PageKey, page_keys
from pdrt.observe.tracing import Span
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Finished,
    FinishReason,
    GatewayToWorker,
    Submit,
    Tokens,
)
from pdrt.sampling import Sampling
from tests.gateway.conftest import HANG_SECONDS, own_seconds
from tests.gateway.workers import DIGEST, GATEWAY, decode, prefill

HEAD = Head("cmpl-1", 0, "tiny", is_chat=False)
CPU_SECONDS_MAX = 1.0
NAMES = TokenNames(lambda token: b"x")


class Letters:
    """Every token is a letter."""

    def push(self, token_ids: Any) -> str:
        return "x" * len(token_ids)

    def finish(self) -> str:
        return ""


class Gateway:
    """A hub with one pair of workers, and what it sends them."""

    def __init__(self, requests_max: int = 64) -> None:
        self.submits: list[Submit] = []
        self._decoder: Decoder[GatewayToWorker] = Decoder(GatewayToWorker, 1 << 24)
        self.hub = Hub(
            GatewayConfig(requests_max=requests_max), (DIGEST,), GATEWAY, self._send, lambda: 0.0
        )
        for message in (prefill(1), decode(9, pairs=(1,))):
            self.hub.registry.on_register(message, 0.0)

    def _send(self, routing_id: bytes, frame: bytes) -> bool:
        message = self._decoder.decode(frame)
        if isinstance(message, Submit):
            self.submits.append(message)
        return True

    def answer(self, choices: int, tokens: int = 4, is_whole: bool = True) -> Answer:
        span = Span("", None, 0)
        made = tuple(_choice(index, tokens, is_whole) for index in range(choices))
        return Answer(self.hub, Job("id", made, HEAD, False, span), self._beside)

    async def _beside(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.to_thread(work)

    async def submitted(self, count: int) -> None:
        """Turns of the loop, until so many were sent."""
        for _ in range(100):
            if len(self.submits) >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.submits)} submitted, not {count}")

    def say(self, tokens: int) -> None:
        """All of every output at once."""
        for submit in self.submits:
            ids = (5,) * tokens
            self._hear(Tokens(submit.request, submit.worker, 0, ids, 0))
            self._hear(Finished(submit.request, submit.worker, FinishReason.LENGTH))

    def _hear(self, message: Tokens | Finished) -> None:
        self.hub.on_frame(routing_id(message.worker), encode(message))


def _choice(index: int, tokens: int, is_whole: bool) -> Choice:
    submission = Submission((1, 2, 3), Sampling(max_tokens=tokens), 600.0, frozenset())
    plan = Plan(index, 0, submission, Shown(), "", False, False, "")
    renderer: Renderer = CompletionEvents(HEAD, index, Shown(), NAMES)
    if is_whole:
        renderer = CompletionWhole(index, Shown(), NAMES, (1, 2, 3))
    return Choice(plan, TextAssembler(submission, Letters(), ()), renderer, None)


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_choices_begin_one_at_a_turn_of_the_loop() -> None:
    gateway = Gateway()
    task = asyncio.create_task(gateway.answer(8).whole(_never))
    seen = []
    for _ in range(20):
        await asyncio.sleep(0)
        seen.append(len(gateway.submits))
    assert seen[-1] == 8
    assert max(after - before for before, after in itertools.pairwise(seen)) == 1
    gateway.say(4)
    assert (await task).status_code == 200
    assert gateway.hub.streams == 0


async def test_choices_of_one_prompt_share_the_work_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []

    def noted(token_ids: Sequence[int], *rest: Any) -> list[PageKey]:
        computed.append(token_ids)
        return page_keys(token_ids, *rest)

    monkeypatch.setattr(prefix_index, "page_keys", noted)
    gateway = Gateway()
    task = asyncio.create_task(gateway.answer(8).whole(_never))
    await gateway.submitted(8)
    assert len(computed) == 1
    gateway.say(4)
    await task


async def test_places_are_kept_for_choices_that_have_not_begun() -> None:
    gateway = Gateway(requests_max=8)
    task = asyncio.create_task(gateway.answer(8).whole(_never))
    await gateway.submitted(1)
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(gateway.answer(1).whole(_never), HANG_SECONDS)
    assert caught.value.status == 429
    await gateway.submitted(8)
    gateway.say(4)
    assert (await task).status_code == 200
    assert gateway.hub.streams == 0


async def test_a_client_that_leaves_while_choices_begin_leaves_nothing() -> None:
    gateway = Gateway()
    is_gone = asyncio.Event()

    async def receive() -> Message:
        await is_gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(gateway.answer(8).whole(receive))
    await gateway.submitted(3)
    is_gone.set()
    assert (await task).status_code == 499
    assert len(gateway.submits) < 8
    assert (gateway.hub.streams, len(gateway.hub.requests)) == (0, 0)


async def test_what_waited_in_many_streams_is_written_bit_by_bit() -> None:
    tokens = answer_module.TOKENS_AT_ONCE
    gateway = Gateway()
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    task = asyncio.create_task(gateway.answer(8, tokens, is_whole=False).events(_never, send))
    await gateway.submitted(8)
    gateway.say(tokens)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 8
    assert b"".join(sent).count(b'"finish_reason":"length"') == 8
    assert max(map(len, sent)) < 2 * len(b"".join(sent)) / 8


async def test_a_large_answer_is_put_together_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = set()
    encode = CompletionWhole.encode

    def noted(self: CompletionWhole) -> bytes:
        threads.add(threading.get_ident())
        return encode(self)

    monkeypatch.setattr(CompletionWhole, "encode", noted)
    gateway = Gateway()
    task = asyncio.create_task(gateway.answer(2, 2000).whole(_never))
    await gateway.submitted(2)
    gateway.say(2000)
    await task
    assert threads and threading.get_ident() not in threads


class Calls:
    """A parser that finds nothing but calls."""

    def push(self, text: str) -> list[Delta]:
        return []

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        for index in range(6000):
            deltas += [ToolCallStart(index, f"call_{index}", "f"), ToolCallArguments(index, "{}")]
        return deltas


def test_many_calls_cost_as_much_each_as_one() -> None:
    chat = ChatWhole(0, Shown(), NAMES, Calls())  # type: ignore[arg-type]
    with own_seconds() as spent:
        chat.finish(Piece(), "stop", None)
        body = chat.encode()
    assert spent() < CPU_SECONDS_MAX
    assert body.count(b'"call_') == 6000
