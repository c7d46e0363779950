"""Clients and gateways: who asks, who goes away, and what every client must have been told."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tests.sim.core import Kind, Violation
from tests.sim.plan import CONFIG
from tests.sim.tokens import next_token

if TYPE_CHECKING:
    from tests.sim.decode import DecodeWorker, Job
    from tests.sim.world import World


class RequestState(Enum):
    WAITING = "waiting"
    ANSWERED = "answered"
    FAILED = "failed"
    GONE = "gone"
    """Its client or its gateway went away."""


class Request:
    """One client's request, across attempts on several decode workers."""

    def __init__(self, serial: int, prompt: tuple[int, ...], max_tokens: int, now: float) -> None:
        self.serial = serial
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.deadline = now + CONFIG.request_timeout_seconds
        self.tokens: list[int] = []
        self.state = RequestState.WAITING
        self.job: Job | None = None
        self.attempts = 0

    def take(self, job: Job, token: int) -> None:
        """A token that a decode worker streams. An older attempt's is dropped by its index."""
        if job is not self.job or self.state is not RequestState.WAITING:
            return
        if token != next_token((*self.prompt, *self.tokens)):
            raise Violation(Kind.TOKEN, f"request {self.serial}: token {len(self.tokens)} is wrong")
        if len(self.tokens) >= max(self.max_tokens, 1):
            raise Violation(Kind.TOKEN, f"request {self.serial}: a token too many")
        self.tokens.append(token)

    def finish(self, job: Job, error: str | None) -> None:
        if job is not self.job or self.state is not RequestState.WAITING:
            return
        if error is None and len(self.tokens) != self.max_tokens:
            raise Violation(Kind.TOKEN, f"request {self.serial}: ended after {len(self.tokens)}")
        self.state = RequestState.ANSWERED if error is None else RequestState.FAILED
        self.job = None


class Gateway:
    """Submits, cancels, and continues a request elsewhere when its decode worker is lost."""

    ATTEMPTS_MAX = 4

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.requests: list[Request] = []

    def ask(self, request: Request) -> None:
        """A client's request arrives."""
        if not self.is_alive:
            request.state = RequestState.GONE
            return
        self.requests.append(request)
        self.submit(request)

    def submit(self, request: Request) -> None:
        """The next attempt, with the tokens streamed so far."""
        if request.state is not RequestState.WAITING or not self.is_alive:
            return
        sim = self.world.sim
        workers = self.world.decodes_alive()
        if sim.now > request.deadline or request.attempts >= self.ATTEMPTS_MAX:
            request.state, request.job = RequestState.FAILED, None
        elif not workers:
            sim.after(0.5, self.submit, request)
        else:
            request.attempts += 1
            worker = sim.rng.choice(workers)
            request.job = worker.make_job(request)
            sim.after(0.005, worker.post, worker.submit, request.job)
            sim.after(CONFIG.silence_seconds, self.watch, request, worker)

    def watch(self, request: Request, worker: DecodeWorker) -> None:
        """A decode worker that is lost costs an attempt."""
        job = request.job
        if job is None or job.worker is not worker or request.state is not RequestState.WAITING:
            return
        if not worker.is_alive:
            self.submit(request)
        else:
            self.world.sim.after(0.5, self.watch, request, worker)

    def abort(self, request: Request) -> None:
        """The client has gone."""
        if request.state is RequestState.WAITING:
            request.state = RequestState.GONE
            self.cancel(request)

    def move(self, request: Request) -> None:
        """A gap in the stream, say: the request goes on elsewhere."""
        if request.state is RequestState.WAITING and request.job is not None:
            self.cancel(request)
            self.submit(request)

    def cancel(self, request: Request) -> None:
        job, request.job = request.job, None
        if job is not None:
            self.world.sim.after(0.005, job.worker.post, job.worker.cancel, job)

    def vanish(self) -> None:
        """The gateway is gone; workers cancel its requests once they notice."""
        self.is_alive = False
        for request in self.requests:
            if request.state is RequestState.WAITING:
                request.state = RequestState.GONE
                job, request.job = request.job, None
                if job is not None:
                    self.world.sim.after(1.0, job.worker.post, job.worker.cancel, job)
