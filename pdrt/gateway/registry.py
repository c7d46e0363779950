"""The workers a gateway knows, by what they last said about themselves: who is lost, who may serve.

Pure. Why nobody can serve, in words, is told by `pdrt.gateway.readiness`.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation, short
from pdrt.model.identity import base_digest
from pdrt.protocol.clock import SilenceClock
from pdrt.protocol.gateway_messages import Register, Registered, Role
from pdrt.protocol.messages import PROTOCOL_VERSION, Fingerprint

LOST_KEPT_SECONDS = 60.0
"""How long /status shows a lost worker; sooner forgotten when the table is full."""
RETRY_SECONDS_MAX = 30
"""What a client is told to wait at most, however long nobody has served."""


class WorkerState(Enum):
    LIVE = "live"
    DRAINING = "draining"
    """Finishes what it has, takes nothing new."""
    LOST = "lost"
    """Silent past the bound, dead, or it said that it ends. It returns if it registers again; but
    not after its last word, for what is read then was said before."""


class WorkerEvent(Enum):
    REGISTERED = "registered"
    REGISTERED_DRAINING = "registered draining"
    SILENT = "silent"
    DIED = "died"
    """Somebody saw it, and its socket is closed."""
    LEFT = "left"
    """Its last word."""


TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.LIVE, WorkerEvent.REGISTERED): WorkerState.LIVE,
    (WorkerState.LIVE, WorkerEvent.REGISTERED_DRAINING): WorkerState.DRAINING,
    (WorkerState.LIVE, WorkerEvent.SILENT): WorkerState.LOST,
    (WorkerState.LIVE, WorkerEvent.DIED): WorkerState.LOST,
    (WorkerState.LIVE, WorkerEvent.LEFT): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerEvent.REGISTERED): WorkerState.LIVE,
    (WorkerState.DRAINING, WorkerEvent.REGISTERED_DRAINING): WorkerState.DRAINING,
    (WorkerState.DRAINING, WorkerEvent.SILENT): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerEvent.DIED): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerEvent.LEFT): WorkerState.LOST,
    (WorkerState.LOST, WorkerEvent.REGISTERED): WorkerState.LIVE,
    (WorkerState.LOST, WorkerEvent.REGISTERED_DRAINING): WorkerState.DRAINING,
    (WorkerState.LOST, WorkerEvent.LEFT): WorkerState.LOST,
}


class Worker(msgspec.Struct):
    """One worker incarnation."""

    register: Register
    """The newest by `seq`."""
    state: WorkerState
    lost_at: float | None = None
    """Set exactly while LOST."""
    lost_by: WorkerEvent | None = None
    """Set exactly while LOST."""
    is_reachable: bool = True
    """False from when nothing could be sent to it until it says something: gets no requests."""
    unpaired: frozenset[str] = frozenset()
    """Decode: usable prefill endpoints that it was paired with, and has lost since."""

    @property
    def incarnation(self) -> Incarnation:
        return self.register.worker

    @property
    def name(self) -> str:
        """As reasons and /status show it."""
        return f"{self.register.role.value} {short(self.register.worker)}"


class Registry:
    """Every worker that registered."""

    def __init__(
        self,
        gateway: Incarnation,
        digests: tuple[str, ...],
        protocol: ProtocolConfig,
        workers_max: int,
        now: float,
    ) -> None:
        """`digests` are those of the gateway's own model (with its weights, and with dummy ones):
        a worker with another one is not used."""
        self._gateway = gateway
        self.digests = digests
        self._workers_max = workers_max
        self._endpoints_max = protocol.prefill_endpoints_max
        self._clock: SilenceClock[Incarnation] = SilenceClock(
            protocol.silence_seconds, protocol.tick_late_seconds, now
        )
        self.workers: dict[Incarnation, Worker] = {}
        """At most `workers_max`. Those not LOST are exactly those the clock watches."""
        self.stale: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""
        self._prefills: dict[Fingerprint, dict[str, Worker]] | None = None
        """Usable prefill workers by fingerprint and endpoint; None when it must be built again."""
        self._decodes: list[Worker] | None = None
        """Those that can serve; None when they must be found again."""
        self._is_untold = False
        """Decode workers may not have been told of the prefill workers as they are now."""
        self._unready_since: float | None = now
        """None exactly while somebody could serve at the last tick."""

    # Events

    def on_register(self, message: Register, now: float) -> Registered | None:
        """The reply, or None for an old message."""
        known = self.workers.get(message.worker)
        if known is not None and message.seq <= known.register.seq:
            self.stale["old_seq"] += 1
            return None
        if known is not None and known.lost_by is WorkerEvent.LEFT:
            self.stale["left"] += 1
            return None
        if refusal := self._refusal(message):
            return Registered(self._gateway, message.worker, message.seq, refusal=refusal)
        stood = None if known is None else _standing(known)
        if known is None:
            known = self.workers[message.worker] = Worker(message, WorkerState.LIVE)
        event = WorkerEvent.REGISTERED_DRAINING if message.draining else WorkerEvent.REGISTERED
        self._move(known, event, now)
        self._reached(known)
        before, known.register = known.register, message
        self._clock.heard(message.worker, now)
        if message.role is Role.PREFILL:
            # A heartbeat that says nothing new leaves what all others would have to go through.
            if _standing(known) != stood:
                self._forget_prefills()
            return Registered(self._gateway, message.worker, message.seq)
        if _standing(known) != stood or before.paired != message.paired:
            self._decodes = None
        usable = self.prefills_for(known)
        was_paired = known.unpaired.union(before.paired)
        known.unpaired = was_paired.intersection(usable).difference(message.paired)
        return self._answer(known)

    def _answer(self, decode: Worker) -> Registered:
        """To its newest `Register`."""
        endpoints = tuple(self.prefills_for(decode))[: self._endpoints_max]
        return Registered(self._gateway, decode.incarnation, decode.register.seq, endpoints)

    def _forget_prefills(self) -> None:
        self._prefills = self._decodes = None
        self._is_untold = True

    def news(self) -> list[Registered]:
        """Their answers once more, for decode workers, when prefill workers have come or gone since
        this was last called: they need not wait for their next heartbeat."""
        if not self._is_untold:
            return []
        self._is_untold = False
        return self.answers()

    def answers(self) -> list[Registered]:
        """To the newest `Register` of every decode worker."""
        return [self._answer(worker) for worker in self.of_role(Role.DECODE)]

    def heard(self, worker: Incarnation, now: float) -> None:
        """Any message is a sign of life, but only a `Register` brings a lost worker back."""
        known = self.workers.get(worker)
        if known is not None and known.state is not WorkerState.LOST:
            self._clock.heard(worker, now)
            self._reached(known)

    def _reached(self, worker: Worker) -> None:
        if not worker.is_reachable:
            worker.is_reachable, self._decodes = True, None

    def on_unreachable(self, worker: Incarnation) -> None:
        """Nothing can be sent to it. It may be dead, and until that is certain it would be
        the first choice for every other request, as it has the fewest."""
        if known := self.workers.get(worker):
            known.is_reachable, self._decodes = False, None

    def on_gone(self, worker: Incarnation, event: WorkerEvent, now: float) -> bool:
        """It has DIED or LEFT: whether it is lost by this."""
        known = self.workers.get(worker)
        if known is None or known.state is WorkerState.LOST:
            if known is not None and event is WorkerEvent.LEFT:
                self._move(known, event, now)
            self.stale["gone_unknown"] += 1
            return False
        self._move(known, event, now)
        self._clock.forget(worker)
        self._forget_prefills()
        return True

    def on_tick(self, now: float) -> list[Incarnation]:
        """Workers lost just now. Everything that has arrived must have been read before."""
        silent = self._clock.tick(now)
        for incarnation in silent:
            self._move(self.workers[incarnation], WorkerEvent.SILENT, now)
            self._forget_prefills()
        for worker in list(self.workers.values()):
            if worker.lost_at is not None and now - worker.lost_at > LOST_KEPT_SECONDS:
                del self.workers[worker.incarnation]
        if self.decodes():
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = now
        return silent

    def _move(self, worker: Worker, event: WorkerEvent, now: float) -> None:
        worker.state = TRANSITIONS[worker.state, event]
        is_lost = worker.state is WorkerState.LOST
        worker.lost_at, worker.lost_by = (now, event) if is_lost else (None, None)

    def _refusal(self, message: Register) -> str | None:
        theirs = message.fingerprint.protocol_version
        if theirs != PROTOCOL_VERSION:
            return f"protocol version {theirs}; this gateway speaks {PROTOCOL_VERSION}"
        if message.role is Role.PREFILL and not (message.endpoint or "").startswith("tcp://"):
            return "a prefill worker must name its endpoint, tcp://HOST:PORT"
        if message.worker in self.workers or len(self.workers) < self._workers_max:
            return None
        lost = [w for w in self.workers.values() if w.lost_at is not None]
        if not lost:
            return f"this gateway knows {self._workers_max} workers already (--workers-max)"
        del self.workers[min(lost, key=lambda w: w.lost_at or 0.0).incarnation]
        return None

    # Questions

    def is_usable(self, worker: Worker) -> bool:
        """True for one that may be given new requests, as far as it goes by itself."""
        return worker.is_reachable and self._is_fit(worker)

    def _is_fit(self, worker: Worker) -> bool:
        return (
            worker.state is WorkerState.LIVE
            and worker.register.healthy
            and base_digest(worker.register.fingerprint.digest) in self.digests
        )

    def is_cut_off(self) -> bool:
        """A decode worker could serve but for its connection, which it may be dialling again."""
        decodes = self.of_role(Role.DECODE)
        return any(not worker.is_reachable and self._is_fit(worker) for worker in decodes)

    def prefills_for(self, decode: Worker) -> dict[str, Worker]:
        """Prefill workers by endpoint that are live, healthy, not draining, and of the same
        fingerprint as `decode`. Where an endpoint was taken over, the newest worker stands."""
        if self._prefills is None:
            self._prefills = {}
            for worker in self.of_role(Role.PREFILL):
                if worker.state is WorkerState.LIVE and worker.register.healthy:
                    endpoint = worker.register.endpoint
                    assert endpoint is not None
                    same = self._prefills.setdefault(worker.register.fingerprint, {})
                    same[endpoint] = worker
        return self._prefills.get(decode.register.fingerprint, {})

    def decodes(self) -> list[Worker]:
        """Decode workers that can serve now: paired with a usable prefill worker, or able to
        compute prompts themselves."""
        if self._decodes is None:
            self._decodes = self._find_decodes()
        return self._decodes

    def is_paired(self, decode: Worker) -> bool:
        """A usable prefill worker can hand prompts over to it. Looks at every pair of its."""
        return not self.prefills_for(decode).keys().isdisjoint(decode.register.paired)

    def _find_decodes(self) -> list[Worker]:
        """Looks at every pair: done when pairs change, not for each request."""
        return [
            worker
            for worker in self.of_role(Role.DECODE)
            if self.is_usable(worker) and (worker.register.local_prefill or self.is_paired(worker))
        ]

    def max_model_len(self) -> int | None:
        """The least of the usable decode workers' limits; None when there are none."""
        lengths = [w.register.max_model_len for w in self.of_role(Role.DECODE) if self.is_usable(w)]
        return min(lengths, default=None)

    def retry_after_seconds(self, now: float) -> int:
        """How long a client that nobody can serve is told to wait, whole seconds from 1.

        Who has been away for some time will be for about as long again: a worker that starts
        anew loads its model first, and how long that takes shows only in the waiting.
        """
        away = 0.0 if self._unready_since is None else now - self._unready_since
        return max(1, min(round(away), RETRY_SECONDS_MAX))

    def find(self, prefix: str) -> list[Worker]:
        """Workers whose name, 16 hex digits, begins so."""
        return [w for w in self.workers.values() if short(w.incarnation).startswith(prefix)]

    def live(self) -> list[Worker]:
        """Those that are not lost, draining ones included."""
        return [w for w in self.workers.values() if w.state is not WorkerState.LOST]

    def of_role(self, role: Role) -> list[Worker]:
        """Those that are not lost."""
        return [worker for worker in self.live() if worker.register.role is role]

    def check_invariants(self) -> None:
        """Raises AssertionError when the registry contradicts itself."""
        assert len(self.workers) <= self._workers_max
        alive = {i for i, w in self.workers.items() if w.state is not WorkerState.LOST}
        assert alive == set(self._clock.watched())
        for incarnation, worker in self.workers.items():
            assert worker.incarnation == incarnation
            assert (worker.lost_at is not None) == (worker.state is WorkerState.LOST)
        assert self._decodes is None or self._decodes == self._find_decodes()


def _standing(prefill: Worker) -> tuple[object, ...]:
    """What decides whom a worker can be paired with."""
    said = prefill.register
    return prefill.state, said.healthy, said.endpoint, said.fingerprint
