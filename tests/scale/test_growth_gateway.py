"""The gateway's tables after a million requests, frames and workers that came and went."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from pdrt.config import GatewayConfig
from pdrt.gateway.effects import Submission
from pdrt.gateway.hub import Hub
from pdrt.gateway.registry import WorkerState
from pdrt.gateway.stream import Outputs, OutputStream
from pdrt.ids import Incarnation, RequestId, routing_id
from pdrt.observe.families import REJECTED, STALE
from pdrt.observe.store import SERIES_MAX, Store
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
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
from pdrt.sampling import Sampling
from tests.gateway.workers import DIGEST, GATEWAY, decode, prefill
from tests.scale.growth import BLOCKS_MAX, left_by

pytestmark = pytest.mark.usefixtures("unlogged")

FRAME_BYTES_MAX = 1 << 16
PREFILLS, DECODES = (1, 2), (11, 12, 13)
SAMPLING = Sampling(max_tokens=4, temperature=0.0)
FAILED = FinishReason.FAILED
LIFE_SECONDS = 0.01
LIVES_PER_TICK = 10
HEARTBEAT_LIVES = 100
REQUEST_SECONDS = 5.0


class Gateway:
    """The hub, on a clock of its own, and workers that answer as they are told."""

    def __init__(self, workers_max: int = 64) -> None:
        self.now = 1000.0
        self.submits: list[Submit] = []
        """Since they were last taken."""
        self._decoder: Decoder[GatewayToWorker] = Decoder(GatewayToWorker, FRAME_BYTES_MAX)
        config = GatewayConfig(workers_max=workers_max)
        self.hub = Hub(config, (DIGEST,), GATEWAY, self._send, lambda: self.now)
        self._seqs = itertools.count(1)

    def _send(self, peer: bytes, frame: bytes) -> bool:
        message = self._decoder.decode(frame)
        if isinstance(message, Submit):
            self.submits.append(message)
        elif isinstance(message, Cancel):
            ended = Finished(message.request, message.worker, FinishReason.CANCELLED)
            self.hear(message.worker, ended)
        return True

    def hear(self, worker: int, message: msgspec.Struct) -> None:
        self.hub.on_frame(routing_id(Incarnation(worker)), encode(message))

    def beat(self) -> None:
        """Every worker's heartbeat."""
        for worker in PREFILLS:
            self.hear(worker, prefill(worker, next(self._seqs)))
        for worker in DECODES:
            self.hear(worker, decode(worker, next(self._seqs), PREFILLS, requests_max=1024))

    def step(self, number: int) -> None:
        self.now += LIFE_SECONDS
        if number % HEARTBEAT_LIVES == 0:
            self.beat()
        if number % LIVES_PER_TICK == 0:
            self.hub.on_tick()

    # Lives of requests

    def live(self, number: int) -> None:
        """One request, from its client to its end, in one of several ways."""
        self.step(number)
        assert self.hub.reserve(1)
        prompt = (number, 5, 6, 7, *range(32))
        submission = Submission(prompt, SAMPLING, self.now + REQUEST_SECONDS, frozenset())
        stream = self.hub.open(submission, Outputs())
        match number % 5:
            case 0:
                self._answer(stream)
            case 1:
                self._speak(self.submits.pop(), 2)
            case 2:
                # The first worker cannot; the second one can.
                submit = self.submits.pop()
                self.hear(submit.worker, Finished(submit.request, submit.worker, FAILED))
                self._answer(stream)
            case 3:
                # Tokens are missing: the rest comes from another one.
                submit = self.submits.pop()
                self._speak(submit, 1)
                self._speak(submit, 1, first=3)
                self._answer(stream)
            case 4:
                self.submits.pop()  # its client leaves before anything has come
        self.hub.close(stream, "done")

    def _answer(self, stream: OutputStream) -> None:
        submit = self.submits.pop()
        count = SAMPLING.max_tokens - len(submit.output_token_ids)
        self._speak(submit, count)
        usage = Usage(len(submit.token_ids), SAMPLING.max_tokens)
        self.hear(
            submit.worker, Finished(submit.request, submit.worker, FinishReason.LENGTH, usage)
        )
        assert stream.take().ended is not None

    def _speak(self, submit: Submit, count: int, first: int | None = None) -> None:
        index = len(submit.output_token_ids) if first is None else first
        told = Tokens(submit.request, submit.worker, index, (7,) * count, 0)
        self.hear(submit.worker, StepTokens(submit.worker, (told,)))


def test_requests_that_come_and_go(times: int) -> None:
    gateway = Gateway()
    gateway.beat()

    def work(numbers: range) -> None:
        for number in numbers:
            gateway.live(number)

    # Each is routed, encoded and decoded, some twice: as long as ten lives of a room take.
    assert left_by(work, times // 10) < BLOCKS_MAX
    hub = gateway.hub
    assert (len(hub.requests), hub.requests.attempts, hub.streams) == (0, 0, 0)
    assert hub.is_quiet
    demand = hub.requests._attempts.demand()
    assert (dict(demand.decode), dict(demand.prefill)) == ({}, {})
    assert hub.router._turns.keys() <= hub.registry.workers.keys()
    assert hub.broken_invariants() == []


def strange(number: int) -> tuple[int, Any]:
    """Who says what: nothing of it is about anything that this gateway knows."""
    worker, other = 11, (1 << 40) + number
    request = RequestId(GATEWAY, (1 << 40) + number, 1)
    match number % 8:
        case 0:
            return worker, Tokens(request, Incarnation(worker), 0, (7,))
        case 1:
            return worker, Finished(request, Incarnation(worker), FinishReason.LENGTH)
        case 2:
            told = Tokens(RequestId(Incarnation(other), 1, 1), Incarnation(worker), 0, (7,))
            return worker, StepTokens(Incarnation(worker), (told,))
        case 3:
            return worker, PromptLogprobs(request, Incarnation(worker), ())
        case 4:
            return worker, Report(Incarnation(worker), other)
        case 5:
            return other, Gone(Incarnation(other))
        case 6:
            return worker, Gone(Incarnation(other))  # in another one's name
        case _:
            return other, Tokens(request, Incarnation(other), 0, (7,))


def test_frames_about_what_nobody_knows(times: int) -> None:
    gateway = Gateway()
    gateway.beat()
    hub = gateway.hub
    hub.render_metrics()

    def work(numbers: range) -> None:
        for number in numbers:
            worker, message = strange(number)
            gateway.hear(worker, message)

    before = hub.render_metrics().count(b"\n")
    assert left_by(work, times) < BLOCKS_MAX
    assert hub.is_quiet
    assert hub.registry.workers.keys() == {*PREFILLS, *DECODES}
    # One line per reason, whatever was said and by whom.
    assert hub.render_metrics().count(b"\n") < before + 20
    assert hub.broken_invariants() == []


def test_workers_that_come_and_go(times: int) -> None:
    """Some say that they leave, some fall silent; some never fit into the table."""
    gateway = Gateway(workers_max=32)
    gateway.beat()
    hub = gateway.hub

    def work(numbers: range) -> None:
        for number in numbers:
            gateway.step(number)
            name = (1 << 40) + number
            is_prefill = number % 2
            gateway.hear(name, prefill(name) if is_prefill else decode(name, 1, PREFILLS))
            if number % 3:
                gateway.hear(name, Gone(Incarnation(name)))

    # As slow as the table is large: who is lost makes room one by one.
    assert left_by(work, times // 4) < BLOCKS_MAX
    assert len(hub.registry.workers) <= 32
    live = hub.registry.live()
    assert {w.incarnation for w in live} >= {*PREFILLS, *DECODES}
    assert all(w.state is WorkerState.LIVE for w in live)
    assert hub.router._turns.keys() <= hub.registry.workers.keys()
    assert hub.broken_invariants() == []


def test_labels_of_metrics(times: int) -> None:
    store = Store("gateway", "w")

    def work(numbers: range) -> None:
        for number in numbers:
            store.add(STALE, 1, f"reason {number}")
            store.add(REJECTED, 1, f"reason {number % 7}")

    assert left_by(work, times) < BLOCKS_MAX
    reasons = store.numbers(STALE)
    assert len(reasons) == SERIES_MAX + 1
    assert sum(reasons.values()) == times + times // 10
    assert len(store.numbers(REJECTED)) == 7
