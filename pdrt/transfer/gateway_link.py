"""A worker's connections to its gateways: registers, keeps them informed, hands in what they
ask. Applies `Registration` (pure) to one DEALER per gateway."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from pdrt.config import ProtocolConfig
from pdrt.errors import ConfigError
from pdrt.ids import Incarnation, routing_id
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Drain,
    Finished,
    GatewayToWorker,
    Gone,
    Inspect,
    PromptLogprobs,
    Register,
    Registered,
    Report,
    StepTokens,
    Submit,
    Tokens,
)
from pdrt.protocol.registration import Registration
from pdrt.transfer.channel import DealerChannel
from pdrt.transfer.cluster_key import ClusterKey
from pdrt.transfer.frames import FrameReader
from pdrt.transfer.handshake import Failure

log = logging.getLogger(__name__)

TOKENS_PER_FRAME_MAX = 256
"""A tenth of a megabyte, where each has 20 alternatives: far below any bound on frames."""
UNANSWERED_SECONDS = 5.0
"""After this long without an answer it is said, again at twice the time, and so on."""

MakeRegister = Callable[[int], Register]
"""Given a `seq`, what this worker says of itself."""
Request = Submit | Cancel | Credit | Inspect | Drain


class View(Protocol):
    """What a worker shows of itself."""

    def render(self) -> bytes:
        """Prometheus text."""

    def status(self) -> bytes:
        """A JSON object."""


class _Link:
    """One gateway."""

    def __init__(self, registration: Registration, channel: DealerChannel, now: float) -> None:
        self.registration = registration
        self.channel = channel
        self.silent_since = now
        self.complain_at = now + UNANSWERED_SECONDS


class GatewayLinks:
    """All gateways of one worker."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        worker: Incarnation,
        config: ProtocolConfig,
        make_register: MakeRegister,
        key: ClusterKey | None = None,
    ) -> None:
        """`endpoints`: HOST:PORT of each gateway's worker port. `key`: the cluster's, if any.

        Raises:
            ConfigError: an endpoint is not HOST:PORT.
        """
        self.on_request: Callable[[Request], None] = lambda request: None
        """A gateway asks for something."""
        self.on_gateway_lost: Callable[[Incarnation], None] = lambda gateway: None
        """Its requests are to be cancelled."""
        self.on_endpoints: Callable[[], None] = lambda: None
        """`prefill_endpoints` may have changed."""
        self.stale: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Handshakes that failed, by reason."""
        self._worker = worker
        self._make_register = make_register
        self._key = key
        self._reader: FrameReader[GatewayToWorker] = FrameReader(
            GatewayToWorker, config.frame_bytes_max, "gateway"
        )
        self.rejected = self._reader.rejected
        self._links: list[_Link] = []
        now = time.monotonic()
        # One named twice is one: two connections would take the routing id from each other.
        for endpoint in dict.fromkeys(endpoints):
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(f"--gateway {endpoint!r}: HOST:PORT is expected")
            registration = Registration(endpoint, worker, config, now)
            link = _Link(registration, self._dial(endpoint, len(self._links), config), now)
            self._links.append(link)

    def _dial(self, endpoint: str, index: int, config: ProtocolConfig) -> DealerChannel:
        channel = DealerChannel(
            f"tcp://{endpoint}",
            routing_id(self._worker),
            lambda frame: self._receive(self._links[index], frame),
            config.frame_bytes_max,
            self._key,
        )
        channel.on_refused = self._count_refused
        return channel

    def _count_refused(self, failure: Failure) -> None:
        self.refused[failure.value] += 1

    @property
    def prefill_endpoints(self) -> set[str]:
        """Prefill workers that the live gateways list; while none lives, those listed last."""
        alive = [link for link in self._links if link.registration.gateway is not None]
        return {e for link in alive or self._links for e in link.registration.prefill_endpoints}

    def complaints(self) -> list[str]:
        """Why nobody sends anything here, by gateway; empty where one does."""
        complaints: list[str] = []
        for link in self._links:
            registration = link.registration
            if registration.refusal is not None:
                complaints.append(f"gateway {registration.endpoint}: {registration.refusal}")
            elif registration.gateway is None:
                complaints.append(f"gateway {registration.endpoint} does not answer")
            else:
                return []
        return complaints

    def gateways(self) -> list[dict[str, object]]:
        """For the status page."""
        return [
            {
                "endpoint": link.registration.endpoint,
                "gateway": link.registration.gateway and f"{link.registration.gateway:016x}",
                "refusal": link.channel.refusal or link.registration.refusal,
            }
            for link in self._links
        ]

    def send_step(self, tokens: Sequence[Tokens]) -> None:
        """What one step yielded, to the gateways that own the requests: in one frame each."""
        by_gateway: dict[Incarnation, list[Tokens]] = {}
        for message in tokens:
            by_gateway.setdefault(message.request.gateway, []).append(message)
        for gateway, theirs in by_gateway.items():
            link = self._of(gateway)
            if link is None:
                continue
            for first in range(0, len(theirs), TOKENS_PER_FRAME_MAX):
                part = tuple(theirs[first : first + TOKENS_PER_FRAME_MAX])
                link.channel.send(encode(StepTokens(self._worker, part)))

    def send(self, message: Tokens | PromptLogprobs | Finished) -> bool:
        """To the gateway that owns the request; False when it is gone or its queue is full."""
        link = self._of(message.request.gateway)
        return link is not None and link.channel.send(encode(message))

    def answer(
        self,
        inspect: Inspect,
        view: View,
        check: Callable[[], None],
        broken_elsewhere: Sequence[str] = (),
    ) -> None:
        """Answer an `Inspect`; `check` raises AssertionError where an invariant is broken.
        `broken_elsewhere`: on other ranks of this worker."""
        broken = tuple(broken_elsewhere)
        if inspect.check:
            try:
                check()
            except AssertionError as error:
                broken = (f"{type(error).__name__}: {error}", *broken)
        link = self._of(inspect.gateway)
        if link is not None:
            report = Report(
                self._worker, inspect.serial, view.render(), view.status(), broken=broken
            )
            link.channel.send(encode(report))

    def _of(self, gateway: Incarnation) -> _Link | None:
        for link in self._links:
            if link.registration.gateway == gateway:
                return link
        return None

    def announce(self, now: float) -> None:
        """Register everywhere at once: something that it says has changed."""
        for link in self._links:
            self._register(link, now)

    def _register(self, link: _Link, now: float) -> None:
        register = self._make_register(link.registration.next_seq(now))
        link.channel.send(encode(register))

    def _receive(self, link: _Link, frame: bytes) -> None:
        message = self._reader.read(frame)
        if message is None:
            return
        if message.worker != self._worker:
            self.stale["other_incarnation"] += 1
            return
        if isinstance(message, Registered):
            self._registered(link, message)
        elif self._asker(message) != link.registration.gateway:
            self.stale["other_gateway"] += 1
        else:
            self.on_request(message)

    @staticmethod
    def _asker(request: Request) -> Incarnation:
        return request.gateway if isinstance(request, Inspect | Drain) else request.request.gateway

    def _registered(self, link: _Link, message: Registered) -> None:
        registration = link.registration
        before = registration.gateway, registration.refusal
        now = time.monotonic()
        lost = registration.registered(message, now)
        if lost is not None:
            self.on_gateway_lost(lost)
        link.silent_since, link.complain_at = now, now + UNANSWERED_SECONDS
        if before != (registration.gateway, registration.refusal):
            if registration.refusal is not None:
                log.error(
                    "refused by the gateway",
                    extra={"gateway": registration.endpoint, "why": registration.refusal},
                )
            else:
                log.info("registered", extra={"gateway": registration.endpoint})
        self.on_endpoints()

    def drain(self) -> None:
        """Read everything that has arrived."""
        for link in self._links:
            link.channel.drain()

    def handle_timer(self, now: float) -> None:
        """Every tick, after `drain`."""
        for link in self._links:
            registration = link.registration
            lost = registration.handle_timer(now)
            if lost is not None:
                log.warning("gateway lost", extra={"gateway": registration.endpoint})
                self.on_gateway_lost(lost)
            if registration.is_due(now):
                self._register(link, now)
            if registration.gateway is None and now >= link.complain_at:
                silent = now - link.silent_since
                link.complain_at = now + silent
                log.warning(
                    "no gateway answers; still trying (is this its --worker-port?)",
                    extra={"gateway": registration.endpoint, "seconds": round(silent)},
                )

    def close(self) -> None:
        """The worker ends: says so, with all that was said before."""
        for link in self._links:
            link.channel.send(encode(Gone(self._worker)))
            link.channel.close()
