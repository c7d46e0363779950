"""Frames to a gateway: whatever a worker says, the gateway goes on, and clients are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest

from pdrt.ids import Incarnation, RequestId, routing_id
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import (
    Finished,
    FinishReason,
    GatewayToWorker,
    Gone,
    PromptLogprobs,
    Report,
    StepTokens,
    Submit,
    Tokens,
    Usage,
)
from pdrt.protocol.messages import PROTOCOL_VERSION, Load
from tests.fuzz.effort import Fuzz, efforts
from tests.fuzz.hostile import mutated, scrambled
from tests.gateway.stand_in import scored
from tests.gateway.whole import Answer, Gateway, as_json, serve
from tests.gateway.workers import GATEWAY, decode, prefill

PREFILL, DECODE, STRANGER = Incarnation(1), Incarnation(2), Incarnation(3)
SERIAL = 1000
BODY = {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1, "echo": True}


class Hostile(Gateway):
    """Its decode worker says `lies` before, or in place of, what it should."""

    lies: list[bytes]
    """Frames that the worker sends first when it is asked for something."""

    def _work(self, peer: bytes, message: GatewayToWorker) -> None:
        if isinstance(message, Submit):
            for lie in self.lies:
                self.hub.on_frame(peer, lie)
        super()._work(peer, message)

    def begin(self) -> None:
        """Workers as they are, whatever was said of them before."""
        self.lies = []
        registry = self.hub.registry
        for worker in registry.live():
            self.hub.on_frame(routing_id(worker.incarnation), encode(Gone(worker.incarnation)))
        registry.workers.clear()
        assert not len(self.hub.requests)
        # What is drawn must not depend on how many there were before.
        self.hub.requests._serial = SERIAL - 1
        for register in (prefill(1), decode(2, pairs=(1,))):
            self.hub.on_frame(routing_id(register.worker), encode(register))


@pytest.fixture(scope="module")
def gateway(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    yield from serve(Hostile, runner, tmp_path_factory)


def tree(message: msgspec.Struct) -> Any:
    """As it travels, in Python's own types."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def frame(of_tree: Any) -> bytes:
    return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(of_tree)


def ask(gateway: Gateway, runner: asyncio.Runner) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"x-request-timeout", b"5")]
    return runner.run(gateway.ask("POST", "/v1/completions", as_json(BODY), headers))


def assert_serves(gateway: Hostile, runner: asyncio.Runner) -> None:
    """Its tables hold, and once its workers say again what they are, it works."""
    assert gateway.hub.broken_invariants() == []
    gateway.begin()
    status, _, body = ask(gateway, runner)
    assert status == 200, body
    runner.run(asyncio.sleep(0))
    assert gateway.hub.is_quiet
    gateway.hub.on_tick()
    for path in (b"/status", b"/metrics", b"/ready"):
        assert runner.run(gateway.ask("GET", path.decode(), b"", []))[0] < 500
    assert gateway.hub.broken_invariants() == []


REGISTERS = [
    prefill(1, seq=10, load=Load(1, 2, 3, 4)),
    decode(2, seq=10, pairs=(1,), refused=("tcp://127.0.0.1:7009: no",), reasons=("r",)),
    prefill(3, seq=1),
    decode(3, seq=1, pairs=(1, 3)),
]


STRAY = [tree(m) for m in (*REGISTERS, Gone(STRANGER), Gone(PREFILL), Report(DECODE, 1, b"x"))]


@efforts(100)
def test_registers_and_what_nobody_asked_for(
    gateway: Hostile, runner: asyncio.Runner, fuzz: Fuzz
) -> None:
    def survives(random: Random) -> None:
        for _ in range(random.randint(1, 5)):
            said = frame(mutated(random, random.choice(STRAY)))
            for peer in (PREFILL, DECODE, STRANGER):
                gateway.hub.on_frame(routing_id(peer), said)
        gateway.hub.on_tick()
        assert_serves(gateway, runner)

    fuzz(survives)


REQUEST = RequestId(GATEWAY, SERIAL, 0)
"""The first attempt at the next request."""
TOKENS = Tokens(REQUEST, DECODE, 0, (5, 6), 0, (scored(5, 2), scored(6, 2)), PREFILL)
TRUTHS = [
    tree(TOKENS),
    tree(StepTokens(DECODE, (TOKENS,))),
    tree(PromptLogprobs(REQUEST, DECODE, (scored(5, 1),), 0, PREFILL)),
    tree(Finished(REQUEST, DECODE, FinishReason.STOP, Usage(3, 2, 1), "detail")),
]


@efforts(100)
def test_answers_that_are_none(gateway: Hostile, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def survives(random: Random) -> None:
        gateway.begin()
        for _ in range(random.randint(1, 4)):
            gateway.lies.append(frame(mutated(random, random.choice(TRUTHS))))
        status, _, body = ask(gateway, runner)
        if status != 200:
            error = json.loads(body)["error"]
            assert error["message"] and error["code"] != "internal_error", body
        assert_serves(gateway, runner)

    fuzz(survives)


@efforts(150)
def test_a_malformed_frame_is_counted_and_nothing_else_happens(
    gateway: Hostile, runner: asyncio.Runner, fuzz: Fuzz
) -> None:
    gateway.begin()
    whole = [encode(register) for register in REGISTERS]

    def counted(random: Random) -> None:
        before, rejected = state(gateway), rejections(gateway)
        # A whole message counts too, as it comes from somebody else than it says.
        gateway.hub.on_frame(b"stranger", scrambled(random, random.choice(whole)))
        assert rejections(gateway) == rejected + 1
        assert state(gateway) == before

    fuzz(counted)
    assert_serves(gateway, runner)


def state(gateway: Gateway) -> Any:
    registry = gateway.hub.registry
    return {i: (w.register, w.state) for i, w in registry.workers.items()}, dict(registry.stale)


def rejections(gateway: Gateway) -> int:
    lines = gateway.hub.metrics.render().decode().splitlines()
    counts = [x.rpartition(" ")[2] for x in lines if x.startswith("pdrt_rejected_frames_total{")]
    return sum(int(float(count)) for count in counts)
