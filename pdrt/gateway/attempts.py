"""Attempts: one decode worker's try at one request. Pure."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TypeVar

import msgspec

from pdrt.config import ProtocolConfig
from pdrt.gateway.effects import Send
from pdrt.gateway.router import Demand, Route
from pdrt.ids import Incarnation, RequestId
from pdrt.protocol.gateway_messages import Cancel, Credit

Key = TypeVar("Key")

CANCEL_KEPT_SECONDS = 10.0
"""After its request's deadline the worker ends an attempt by itself: no more cancels."""


class AttemptState(Enum):
    RUNNING = "running"
    CANCELLING = "cancelling"
    """The client no longer depends on it; `Cancel` is resent."""
    GONE = "gone"


class AttemptEvent(Enum):
    TOKENS = "tokens"
    GAP = "gap"
    FINISHED = "finished"
    UNDELIVERED = "undelivered"
    """The socket refused the `Submit`."""
    WORKER_LOST = "worker lost"
    CANCEL = "cancel"
    """Client gone, stop string, deadline, shutdown."""
    EXPIRED = "expired"


TRANSITIONS: dict[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.RUNNING, AttemptEvent.TOKENS): AttemptState.RUNNING,
    (AttemptState.RUNNING, AttemptEvent.GAP): AttemptState.CANCELLING,
    (AttemptState.RUNNING, AttemptEvent.FINISHED): AttemptState.GONE,
    (AttemptState.RUNNING, AttemptEvent.UNDELIVERED): AttemptState.GONE,
    (AttemptState.RUNNING, AttemptEvent.WORKER_LOST): AttemptState.GONE,
    (AttemptState.RUNNING, AttemptEvent.CANCEL): AttemptState.CANCELLING,
    (AttemptState.CANCELLING, AttemptEvent.TOKENS): AttemptState.CANCELLING,
    (AttemptState.CANCELLING, AttemptEvent.FINISHED): AttemptState.GONE,
    (AttemptState.CANCELLING, AttemptEvent.WORKER_LOST): AttemptState.GONE,
    (AttemptState.CANCELLING, AttemptEvent.EXPIRED): AttemptState.GONE,
}


class Attempt(msgspec.Struct):
    """One worker's try."""

    id: RequestId
    route: Route
    expires: float
    heard: float
    """When it last said something, or was last sent a credit."""
    state: AttemptState = AttemptState.RUNNING
    is_waiting: bool = True
    """Until its first token, or its end if that comes first."""
    credited: int = 0
    resend_at: float = 0.0
    resend_pause: float = 0.0
    cancel_reason: str = ""

    @property
    def worker(self) -> Incarnation:
        return self.route.decode

    @property
    def prefill(self) -> str:
        """The endpoint preferred for it; empty where there is none."""
        return next(iter(self.route.prefill_endpoints), "")


class Attempts:
    """Those not GONE, and how many each worker has of them."""

    def __init__(self, protocol: ProtocolConfig) -> None:
        self._resend_seconds = protocol.revoke_resend_seconds
        self._resend_seconds_max = protocol.revoke_resend_seconds_max
        self._attempts: dict[RequestId, Attempt] = {}
        self._by_worker: Counter[Incarnation] = Counter()
        """Attempts, cancelled ones included: their worker has not said that it stopped."""
        self._by_prefill: Counter[str] = Counter()
        """`prefill_tokens` of attempts that are waiting for their first token."""

    def __len__(self) -> int:
        return len(self._attempts)

    def get(self, id: RequestId, worker: Incarnation) -> Attempt | None:
        """The attempt, if `worker` has it."""
        attempt = self._attempts.get(id)
        return attempt if attempt is not None and attempt.worker == worker else None

    def at(self, worker: Incarnation) -> list[Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.worker == worker]

    def hanging_at(self, worker: Incarnation) -> list[Attempt]:
        """Those running that `worker` must get on: it decodes them, or computes their prompts."""
        return [
            attempt
            for attempt in self._attempts.values()
            if attempt.state is AttemptState.RUNNING
            and worker in (attempt.worker, attempt.route.prefill if attempt.is_waiting else None)
        ]

    def demand(self) -> Demand:
        return Demand(self._by_worker, self._by_prefill)

    def open(self, id: RequestId, route: Route, deadline: float, now: float) -> Attempt:
        assert id not in self._attempts
        attempt = Attempt(id, route, deadline + CANCEL_KEPT_SECONDS, now)
        self._attempts[id] = attempt
        self._by_worker[attempt.worker] += 1
        self._by_prefill[attempt.prefill] += route.prefill_tokens
        return attempt

    def move(self, attempt: Attempt, event: AttemptEvent) -> None:
        """Raises KeyError, and changes nothing, for an event that cannot happen now."""
        attempt.state = TRANSITIONS[attempt.state, event]
        if attempt.is_waiting and (
            event is AttemptEvent.TOKENS or attempt.state is AttemptState.GONE
        ):
            attempt.is_waiting = False
            _decrease(self._by_prefill, attempt.prefill, attempt.route.prefill_tokens)
        if attempt.state is AttemptState.GONE:
            del self._attempts[attempt.id]
            _decrease(self._by_worker, attempt.worker, 1)

    def cancel(self, attempt: Attempt, event: AttemptEvent, reason: str, now: float) -> Send:
        self.move(attempt, event)
        assert attempt.state is AttemptState.CANCELLING
        attempt.cancel_reason = reason
        attempt.resend_pause = self._resend_seconds
        return self._send_cancel(attempt, now)

    def credit(self, attempt: Attempt, tokens_taken: int, now: float) -> Send:
        attempt.heard = now
        attempt.credited = tokens_taken
        return Send(Credit(attempt.id, attempt.worker, tokens_taken))

    def on_tick(self, now: float) -> list[Send]:
        """The cancels to resend."""
        sends: list[Send] = []
        for attempt in list(self._attempts.values()):
            if attempt.state is AttemptState.CANCELLING and now >= attempt.resend_at:
                if now >= attempt.expires:
                    self.move(attempt, AttemptEvent.EXPIRED)
                else:
                    sends.append(self._send_cancel(attempt, now))
        return sends

    def _send_cancel(self, attempt: Attempt, now: float) -> Send:
        attempt.resend_at = now + attempt.resend_pause
        attempt.resend_pause = min(2 * attempt.resend_pause, self._resend_seconds_max)
        return Send(Cancel(attempt.id, attempt.worker, attempt.cancel_reason))

    def running(self) -> set[RequestId]:
        return {i for i, a in self._attempts.items() if a.state is AttemptState.RUNNING}

    def check_invariants(self) -> None:
        """Raises AssertionError when the counts contradict the table."""
        attempts = self._attempts.values()
        assert all(a.state is not AttemptState.GONE for a in attempts)
        assert self._by_worker == Counter(a.worker for a in attempts)
        waiting: Counter[str] = Counter()
        for attempt in attempts:
            if attempt.is_waiting:
                waiting[attempt.prefill] += attempt.route.prefill_tokens
        assert self._by_prefill == waiting


def _decrease(counter: Counter[Key], key: Key, amount: int) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
