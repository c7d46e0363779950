"""Where the gateway's pure core meets sockets and clients: the one place that applies effects."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from pdrt.config import GatewayConfig
from pdrt.gateway.doubts import PROBE_SERIAL, Doubts
from pdrt.gateway.drains import Drains
from pdrt.gateway.effects import (
    Assigned,
    Deliver,
    DeliverPrompt,
    Effect,
    Ended,
    Send,
    Submission,
)
from pdrt.gateway.inspection import Inspector
from pdrt.gateway.readiness import LOST_WORDS, mismatches, readiness
from pdrt.gateway.registry import Registry, WorkerEvent, WorkerState
from pdrt.gateway.requests import Requests
from pdrt.gateway.router import Router
from pdrt.gateway.stream import Outputs, OutputStream
from pdrt.gateway.view import set_gauges
from pdrt.ids import Incarnation, routing_id, short
from pdrt.observe.metrics import Metrics
from pdrt.observe.tracing import Tracer
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.protocol.codec import BadFrame, Decoder, encode
from pdrt.protocol.gateway_messages import (
    Finished,
    GatewayToWorker,
    Gone,
    Inspect,
    PromptLogprobs,
    Register,
    Report,
    StepTokens,
    Submit,
    Tokens,
    WorkerToGateway,
)

log = logging.getLogger("pdrt.gateway")

DISCONNECTED_SECONDS = 0.5
"""libzmq tells of the end of a connection shortly before it refuses to send there."""


class Hub:
    """All state of the gateway. Used on the loop only; nothing here waits or blocks."""

    def __init__(
        self,
        config: GatewayConfig,
        digests: tuple[str, ...],
        incarnation: Incarnation,
        send: Callable[[bytes, bytes], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send(routing_id, frame)` never blocks and says whether the frame was taken."""
        self.incarnation = incarnation
        self.metrics = Metrics("gateway", short(incarnation))
        self.tracer = Tracer(config.observe.otlp_endpoint, "gateway", short(incarnation))
        self.clock = clock
        self.read_all: Callable[[], None] = lambda: None
        """Dispatch every frame that has arrived."""
        self.is_draining = False
        """Set once: no new requests."""
        self._send_frame = send
        self._decoder: Decoder[WorkerToGateway] = Decoder(
            WorkerToGateway, config.protocol.frame_bytes_max
        )
        self.registry = Registry(incarnation, digests, config.protocol, config.workers_max, clock())
        self.router = Router(self.registry)
        self.requests = Requests(incarnation, config, self.router)
        self._requests_max = config.requests_max
        self.drains = Drains(incarnation, self.registry)
        self.doubts = Doubts(incarnation, self.registry)
        self._inspector = Inspector(incarnation, self._send)
        self._streams: dict[int, OutputStream] = {}
        """By serial: every request of `requests`, and those ending in this very step."""
        self._reserved = 0
        """Places of requests that are about to begin."""
        self._look_until = 0.0
        """When every decode worker has shown again that it can be reached."""

    def _send(self, message: GatewayToWorker) -> bool:
        return self._send_frame(routing_id(message.worker), encode(message))

    # From workers and the timer

    def on_frame(self, peer: bytes, frame: bytes) -> None:
        """One frame from the worker channel; a bad one is counted and changes nothing."""
        try:
            message = self._decoder.decode(frame)
        except BadFrame as error:
            self.metrics.count_rejected_frame(error.reason)
            return
        if peer != routing_id(message.worker):
            self.metrics.count_rejected_frame("identity")
            return
        now = self.clock()
        self.registry.heard(message.worker, now)
        match message:
            case Register():
                self._on_register(message, now)
            case Tokens():
                self._apply(self.requests.on_tokens(message, now))
            case StepTokens():
                for tokens in message.tokens:
                    if tokens.worker == message.worker:
                        self._apply(self.requests.on_tokens(tokens, now))
            case PromptLogprobs():
                self._apply(self.requests.on_prompt_logprobs(message, now))
            case Finished():
                self._apply(self.requests.on_finished(message, now))
            case Gone():
                self._lose(message.worker, WorkerEvent.LEFT, logging.INFO)
            case Report(serial=serial) if serial != PROBE_SERIAL:
                if not self._inspector.on_report(message):
                    self.metrics.count_stale_message("report_unasked")

    def _on_register(self, message: Register, now: float) -> None:
        known = self.registry.workers.get(message.worker)
        before = None if known is None else known.state
        reply = self.registry.on_register(message, now)
        if reply is None:
            return
        self._send(reply)
        after = self.registry.workers.get(message.worker)
        if after is None:
            who = f"{message.role.value} {short(message.worker)}"
            log.warning("%s is refused: %s", who, reply.refusal)
            return
        if message.hangs:
            self._apply(self.requests.on_worker_hangs(message.worker, now))
        if after.state is not before:
            log.info("%s is %s", after.name, after.state.value)
            if after.state is WorkerState.LIVE:
                for mismatch in mismatches(self.registry, after):
                    log.warning(mismatch)

    def on_tick(self) -> None:
        """Every `TICK_SECONDS`, after all inbound frames were dispatched."""
        now = self.clock()
        self.metrics.observe_tick(now, TICK_SECONDS)
        for worker in self.registry.on_tick(now):
            self._on_lost(worker, LOST_WORDS[WorkerEvent.SILENT], logging.WARNING, now)
        for news in self.registry.news():
            self._send(news)
        self._look_for_the_cut_off()
        self._probe(self.doubts.on_tick(now))
        for message in self.drains.on_tick(now):
            self._send(message)
        self._apply(self.requests.on_tick(now))

    def _on_lost(self, worker: Incarnation, why: str, level: int, now: float) -> None:
        log.log(level, "%s is lost: it %s", self.registry.workers[worker].name, why)
        self.router.forget(worker)
        self._apply(self.requests.on_worker_lost(worker, now))

    def on_disconnected(self) -> None:
        """The connection of some worker has ended; whose, shows when something is sent."""
        self._look_until = self.clock() + DISCONNECTED_SECONDS

    def _look_for_the_cut_off(self) -> None:
        """Who has died or is dialling again gets no requests, and nobody is told that it serves."""
        if self.clock() < self._look_until:
            for answer in self.registry.answers():
                if not self._send(answer):
                    self.registry.on_unreachable(answer.worker)

    # From those who run it

    def drain(self, worker: Incarnation) -> None:
        """Have a worker finish what it has, and leave. Idempotent."""
        for message in self.drains.ask(worker, self.clock()):
            log.info("%s is asked to leave", self.registry.workers[worker].name)
            self._send(message)

    def doubt(self, worker: Incarnation) -> None:
        """Whoever started it saw it die: once its socket shows it, its requests go on elsewhere.
        Idempotent."""
        self._probe(self.doubts.ask(worker, self.clock()))

    def _probe(self, probes: Iterable[Inspect]) -> None:
        for probe in probes:
            if not self._send(probe):
                self.read_all()  # what it said while it lived must not bring it back
                self._lose(probe.worker, WorkerEvent.DIED, logging.WARNING)

    def _lose(self, worker: Incarnation, event: WorkerEvent, level: int) -> None:
        now = self.clock()
        if self.registry.on_gone(worker, event, now):
            self._on_lost(worker, LOST_WORDS[event], level, now)

    # From clients

    def reserve(self, count: int) -> bool:
        """Places for so many requests; False when there are too few. Whoever calls must `open` or
        `release` each."""
        if self.streams + count > self._requests_max:
            return False
        self._reserved += count
        return True

    def release(self, count: int) -> None:
        self._reserved -= count
        assert self._reserved >= 0, "a place that nobody reserved"

    def open(self, submission: Submission, outputs: Outputs) -> OutputStream:
        """Begin a request, in a reserved place; its news goes to `outputs`. Whoever calls must
        `close` the stream."""
        self.release(1)
        now = self.clock()
        serial, effects = self.requests.open(submission, now)
        stream = self._streams[serial] = OutputStream(serial, now, outputs)
        self._apply(effects)
        return stream

    def take(self, stream: OutputStream, tokens_taken: int) -> None:
        """The client has been sent so many tokens of the whole output."""
        self._apply(self.requests.take(stream.serial, tokens_taken, self.clock()))

    def abandon(self, stream: OutputStream, reason: str) -> None:
        """Nothing more is wanted: cancel what still runs upstream. Idempotent."""
        self._apply(self.requests.abandon(stream.serial, reason, self.clock()))

    def close(self, stream: OutputStream, outcome: str) -> None:
        """The answer is over."""
        self.abandon(stream, outcome)
        del self._streams[stream.serial]
        self.metrics.count_request(outcome)

    @property
    def streams(self) -> int:
        """Requests whose answers are not over, those that are about to begin included."""
        return len(self._streams) + self._reserved

    @property
    def is_quiet(self) -> bool:
        """Every client has its answer, and every worker has said that it stopped."""
        return not self.streams and not self.requests.attempts

    def shut_down(self) -> None:
        """End every request; their clients are told, their workers too."""
        self.is_draining = True
        self._apply(self.requests.shut_down(self.clock()))

    # Effects

    def _apply(self, effects: Iterable[Effect]) -> None:
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Send(message):
                    if not self._send(message) and isinstance(message, Submit):
                        self.registry.on_unreachable(message.worker)
                        pending.extend(self.requests.on_undelivered(message.request, self.clock()))
                case Assigned(serial, decode, recomputed_tokens):
                    self._streams[serial].decodes.append(decode)
                    if recomputed_tokens:
                        self.metrics.count_recomputed_prompt_tokens(recomputed_tokens)
                        log.warning("request %d moves to decode worker %s", serial, short(decode))
                case Deliver() as deliver:
                    self._deliver(self._streams[deliver.serial], deliver)
                case DeliverPrompt() as deliver:
                    self._streams[deliver.serial].put_prompt(deliver)
                case Ended() as ended:
                    self._streams[ended.serial].end(ended)

    def _deliver(self, stream: OutputStream, deliver: Deliver) -> None:
        now = self.clock()
        if stream.heard is None:
            stream.first = now
            self.metrics.observe_ttft(now - stream.opened)
        else:
            count = len(deliver.token_ids)
            self.metrics.observe_itl((now - stream.heard) / count, count)
        stream.heard = now
        self.metrics.count_output_tokens(len(deliver.token_ids))
        stream.put(deliver)

    # Questions

    async def inspect(self, check: bool, seconds_max: float) -> dict[Incarnation, Report]:
        """Reports of the workers that are not lost, as far as they come in time."""
        workers = [worker.incarnation for worker in self.registry.live()]
        return await self._inspector.ask(workers, check, seconds_max)

    def readiness(self) -> tuple[bool, list[str]]:
        if self.is_draining:
            return False, ["the gateway is shutting down"]
        return readiness(self.registry)

    def render_metrics(self) -> bytes:
        """The gateway's own metrics."""
        for stale in (self.registry.stale, self.requests.stale):
            for reason, count in stale.items():
                self.metrics.count_stale_message(reason, count)
            stale.clear()
        set_gauges(self.metrics, self.registry, self.requests, self.streams)
        return self.metrics.render()

    def broken_invariants(self) -> list[str]:
        """Contradictions in the gateway's own tables; none in a correct gateway."""
        broken = []
        checks = (self.registry, self.requests, self.router.index)
        for check in (owner.check_invariants for owner in checks):
            try:
                check()
            except AssertionError as error:
                broken.append(f"{check.__qualname__}: {error}")
        return broken
