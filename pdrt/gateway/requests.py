"""The life of every request at the gateway: attempts, tokens, credit, cancels, deadlines. Pure.

A request is one client's; an attempt is one decode worker's try at it. When an attempt fails in
mid-stream the next one continues with the tokens that exist: the draw of a token depends on seed
and position only, so the client cannot tell. Every method returns effects, in order.

A request that has begun and finds no decode worker any more waits for one, within a bound: its
worker may be starting anew. One that has not begun is refused at once, unless all that is missing
is a connection: that may be back in a moment.

Log probabilities of the prompt are asked for until they have come once. Output is held back until
then, as an answer begins with them: an attempt that ends before leaves nothing behind, and the next
one begins anew.
"""

from __future__ import annotations

from collections import Counter

from pdrt.config import GatewayConfig
from pdrt.gateway.attempts import Attempt, AttemptEvent, Attempts, AttemptState
from pdrt.gateway.effects import (
    Assigned,
    Deliver,
    DeliverPrompt,
    Effect,
    Ended,
    Send,
    Submission,
)
from pdrt.gateway.prefix_index import Prompt
from pdrt.gateway.request_state import Failure, RequestState
from pdrt.gateway.router import Route, Routing
from pdrt.ids import Incarnation, RequestId
from pdrt.protocol.gateway_messages import (
    Cancel,
    Finished,
    FinishReason,
    PromptLogprobs,
    Submit,
    Tokens,
)

CREDIT_STRIDE_TOKENS = 16
"""A credit is sent when so many tokens were taken since the last one."""
CREDIT_QUIET_SECONDS = 0.25
"""Or when the attempt has said nothing for so long: it may wait for the rest. One that speaks does
not, and a credit to each at every tick would be nearly one per token."""
CREDIT_RESEND_SECONDS = 1.0
"""Pause between credits to an attempt that says nothing. A credit may have been lost; and a worker
that lost the request (its `Submit` never came, or its `Finished` was dropped) answers one with
`Finished`, so that no client waits for its deadline."""
RETRIED = frozenset({FinishReason.FAILED, FinishReason.UNAVAILABLE, FinishReason.CANCELLED})
"""Another worker may do better. CANCELLED: the worker took this gateway for lost."""
WAITING_LOOK_SECONDS = 0.25
"""How often those that wait for a decode worker look for one."""
REDIAL_SECONDS_MAX = 3.0
"""A connection that was cut is dialled again within a second, and used with the next heartbeat."""
LOST = Failure(FinishReason.UNAVAILABLE, "the decode worker was lost")
HANGS = Failure(FinishReason.UNAVAILABLE, "the worker that had it hangs")


class Requests:
    """Requests in flight and the attempts at them."""

    def __init__(
        self,
        gateway: Incarnation,
        config: GatewayConfig,
        router: Routing,
    ) -> None:
        self._gateway = gateway
        self._requests_max = config.requests_max
        self._attempts_max = config.attempts_max
        self._worker_wait_seconds = config.worker_wait_seconds
        self._router = router
        self._serial = 0
        self._requests: dict[int, RequestState] = {}
        """By serial; at most `requests_max`."""
        self._attempts = Attempts(config.protocol)
        """The RUNNING ones are exactly the `attempt`s of `_requests`."""
        self._look_at = 0.0
        """When those that wait look next."""
        self._newest_prompt = Prompt((), "")
        """Choices of one prompt come one after another: its keys are computed once."""
        self.stale: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def attempts(self) -> int:
        """Attempts not gone, cancelled ones included."""
        return len(self._attempts)

    @property
    def waiting(self) -> int:
        """Requests that have begun and wait for a decode worker."""
        return sum(request.waiting is not None for request in self._requests.values())

    # Events of the client

    def open(self, submission: Submission, now: float) -> tuple[int, list[Effect]]:
        """Accept a request; it may have ended already when this returns."""
        self._serial += 1
        serial = self._serial
        # Cancelled attempts count: their workers have not said that they stopped.
        if (
            len(self._requests) >= self._requests_max
            or len(self._attempts) >= 2 * self._requests_max
        ):
            detail = f"{self._requests_max} requests are in flight already"
            return serial, [Ended(serial, FinishReason.OVERLOADED, detail)]
        asks_prompt = submission.sampling.prompt_logprobs is not None
        prompt = Prompt(submission.token_ids, submission.cache_salt, may_reuse=not asks_prompt)
        if prompt.is_same(self._newest_prompt):
            prompt = self._newest_prompt
        self._newest_prompt = prompt
        self._requests[serial] = RequestState(submission, prompt, asks_prompt)
        nobody = Failure(FinishReason.UNAVAILABLE, "no pair of workers can serve now")
        return serial, self._next_attempt(serial, nobody, now)

    def take(self, serial: int, tokens_taken: int, now: float) -> list[Effect]:
        """The client has read `tokens_taken` tokens, counted over the whole request."""
        request = self._requests.get(serial)
        if request is None:
            return []
        assert request.taken <= tokens_taken <= len(request.output)
        request.taken = tokens_taken
        attempt = request.attempt
        if attempt is None or tokens_taken - attempt.credited < CREDIT_STRIDE_TOKENS:
            return []
        return [self._attempts.credit(attempt, tokens_taken, now)]

    def abandon(self, serial: int, reason: str, now: float) -> list[Effect]:
        """The client needs nothing more. Idempotent; no `Ended` follows."""
        request = self._requests.pop(serial, None)
        if request is None:
            return []
        return self._cancel(request, reason, now)

    # Events of workers

    def on_tokens(self, message: Tokens, now: float) -> list[Effect]:
        attempt = self._heard(message, now)
        if isinstance(attempt, list):
            return attempt
        serial = message.request.serial
        request = self._requests[serial]
        received = len(request.output)
        if message.cached_tokens is not None:
            request.cached_tokens = message.cached_tokens
            self._router.learn(attempt.route, message.prefill, message.cached_tokens)
        if message.first_index > received:
            detail = f"tokens {received} to {message.first_index - 1} are missing"
            return self._give_up(attempt, "gap", Failure(FinishReason.FAILED, detail), now)
        sampling = request.submission.sampling
        asked = len(message.token_ids) if sampling.logprobs is not None else 0
        if len(message.logprobs) != asked:
            detail = f"{len(message.logprobs)} log probabilities came, not {asked}"
            return self._give_up(attempt, "logprobs", Failure(FinishReason.FAILED, detail), now)
        fresh = slice(received - message.first_index, sampling.max_tokens - message.first_index)
        token_ids = message.token_ids[fresh]
        if len(token_ids) < len(message.token_ids):
            self.stale["tokens_again"] += 1
        if not token_ids:
            return []
        request.output.extend(token_ids)
        request.waits_since = None
        cached, logprobs = request.cached, message.logprobs[fresh]
        deliver = Deliver(serial, token_ids, cached, logprobs, message.prefill)
        if request.lacks_prompt_logprobs:
            request.held.append(deliver)
            return []
        return [deliver]

    def on_prompt_logprobs(self, message: PromptLogprobs, now: float) -> list[Effect]:
        attempt = self._heard(message, now)
        if isinstance(attempt, list):
            return attempt
        serial = message.request.serial
        request = self._requests[serial]
        if not request.lacks_prompt_logprobs:
            self.stale["prompt_logprobs_again"] += 1
            return []
        asked = len(request.submission.token_ids) - 1
        if len(message.logprobs) != asked:
            detail = f"{len(message.logprobs)} log probabilities of the prompt came, not {asked}"
            return self._give_up(attempt, "logprobs", Failure(FinishReason.FAILED, detail), now)
        request.cached_tokens = message.cached_tokens
        request.lacks_prompt_logprobs = False
        held, request.held = request.held, []
        cached = request.cached
        return [DeliverPrompt(serial, message.logprobs, cached, message.prefill), *held]

    def _heard(self, message: Tokens | PromptLogprobs, now: float) -> Attempt | list[Effect]:
        """The running attempt that says this; else what to do about the message."""
        attempt = self._attempts.get(message.request, message.worker)
        if attempt is None:
            return self._answer_unknown(message)
        self._attempts.move(attempt, AttemptEvent.TOKENS)
        if attempt.state is AttemptState.CANCELLING:
            self.stale["tokens_cancelled"] += 1
            return []
        attempt.heard = now
        return attempt

    def _give_up(self, attempt: Attempt, why: str, failure: Failure, now: float) -> list[Effect]:
        """This attempt's output cannot be used any more: the next one."""
        cancel = self._attempts.cancel(attempt, AttemptEvent.GAP, why, now)
        return [cancel, *self._next_attempt(attempt.id.serial, failure, now)]

    def on_finished(self, message: Finished, now: float) -> list[Effect]:
        attempt = self._attempts.get(message.request, message.worker)
        if attempt is None:
            self.stale["finished_unknown"] += 1
            return []
        was_running = attempt.state is AttemptState.RUNNING
        self._attempts.move(attempt, AttemptEvent.FINISHED)
        if not was_running:
            return []
        serial = message.request.serial
        request = self._requests[serial]
        usage = message.usage
        if usage is not None:
            request.cached_tokens = usage.cached_tokens
        if message.reason in RETRIED:
            # Who cancels has not refused: it serves this gateway again once it hears of it.
            if message.reason is not FinishReason.CANCELLED:
                request.refused.add(message.worker)
            # A request outlives any number of workers that are restarted: each is asked once.
            request.handed_on += message.reason is FinishReason.UNAVAILABLE
            reason = message.reason
            if reason is FinishReason.CANCELLED:
                reason = FinishReason.UNAVAILABLE
            return self._next_attempt(serial, Failure(reason, message.detail), now)
        if message.reason in (FinishReason.STOP, FinishReason.LENGTH):
            missing = request.missing(usage)
            if missing is not None:
                return self._next_attempt(serial, Failure(FinishReason.FAILED, missing), now)
        return self._end(serial, message.reason, message.detail)

    def on_undelivered(self, request_id: RequestId, now: float) -> list[Effect]:
        """The `Submit` of this attempt was refused by the socket."""
        request = self._requests[request_id.serial]
        attempt = request.attempt
        assert attempt is not None and attempt.id == request_id
        request.unreached.add(attempt.worker)
        request.handed_on += 1
        self._attempts.move(attempt, AttemptEvent.UNDELIVERED)
        failure = Failure(FinishReason.UNAVAILABLE, "the decode worker cannot be reached")
        return self._next_attempt(request_id.serial, failure, now)

    def on_worker_lost(self, worker: Incarnation, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for attempt in self._attempts.at(worker):
            was_running = attempt.state is AttemptState.RUNNING
            self._attempts.move(attempt, AttemptEvent.WORKER_LOST)
            if was_running:
                self._requests[attempt.id.serial].was_lost = True
                effects += self._next_attempt(attempt.id.serial, LOST, now)
        return effects

    def on_worker_hangs(self, worker: Incarnation, now: float) -> list[Effect]:
        """It says so, perhaps again and again. What it has goes on elsewhere; each such attempt
        counts, as it may be the request itself that no forward returns from."""
        effects: list[Effect] = []
        for attempt in self._attempts.hanging_at(worker):
            self._requests[attempt.id.serial].was_lost = True
            effects += self._give_up(attempt, "hangs", HANGS, now)
        return effects

    # Events of time

    def on_tick(self, now: float) -> list[Effect]:
        """Deadlines, workers for those that wait, cancels to resend, credits that are due."""
        effects: list[Effect] = []
        looks = now >= self._look_at
        if looks:
            self._look_at = now + WAITING_LOOK_SECONDS
        for serial, request in list(self._requests.items()):
            attempt = request.attempt
            if now >= request.submission.deadline:
                effects += self._cancel(request, "deadline", now)
                effects += self._end(serial, FinishReason.DEADLINE, "the request took too long")
            elif attempt is None:
                effects += self._look(serial, request, now) if looks else []
            else:
                has_rest = request.taken > attempt.credited
                pause = CREDIT_QUIET_SECONDS if has_rest else CREDIT_RESEND_SECONDS
                if now - attempt.heard >= pause:
                    effects.append(self._attempts.credit(attempt, request.taken, now))
        return effects + list(self._attempts.on_tick(now))

    def _look(self, serial: int, request: RequestState, now: float) -> list[Effect]:
        """A worker for one that waits, or its end."""
        failure, request.waiting = request.waiting, None
        assert failure is not None
        request.unreached.clear()  # the router knows who still is
        return self._next_attempt(serial, failure, now)

    def _cancel(self, request: RequestState, why: str, now: float) -> list[Effect]:
        """What runs upstream, if anything."""
        if request.attempt is None:
            return []
        return [self._attempts.cancel(request.attempt, AttemptEvent.CANCEL, why, now)]

    def shut_down(self, now: float) -> list[Effect]:
        """End everything that is still running, upstream too."""
        effects: list[Effect] = []
        for serial, request in list(self._requests.items()):
            effects += self._cancel(request, "shutdown", now)
            effects += self._end(serial, FinishReason.UNAVAILABLE, "the gateway is shutting down")
        return effects

    # How they are carried out

    def _next_attempt(self, serial: int, failure: Failure, now: float) -> list[Effect]:
        """Submit to the next worker, wait for one, or end the request as `failure` says."""
        request = self._requests[serial]
        request.attempt = None
        request.give_up_held()
        submission, output = request.submission, request.output
        is_first = request.attempts == 0
        ended = None if is_first else submission.is_complete(output)
        if ended is not None and not request.lacks_prompt_logprobs:
            return self._end(serial, ended)
        if now >= submission.deadline:
            return self._end(serial, FinishReason.DEADLINE, "the request took too long")
        route = None
        may_go_on = request.attempts - request.handed_on < self._attempts_max
        if may_go_on:
            demand, excluded = self._attempts.demand(), request.refused | request.unreached
            route = self._router.choose(demand, request.prompt, request.tried, excluded)
        if route is not None:
            return self._submit(serial, request, route, now)
        may_wait = may_go_on and failure.reason is FinishReason.UNAVAILABLE
        if may_wait and self._goes_on_waiting(request, now):
            request.waiting = failure
            return []
        return self._end(serial, failure.reason, failure.detail)

    def _goes_on_waiting(self, request: RequestState, now: float) -> bool:
        """For somebody who can serve it."""
        seconds = self._worker_wait_seconds
        if not request.has_begun:
            seconds = min(seconds, REDIAL_SECONDS_MAX) if self._router.is_cut_off() else 0.0
        if request.waits_since is None:
            request.waits_since = now
        return now < request.waits_since + seconds

    def _submit(self, serial: int, request: RequestState, route: Route, now: float) -> list[Effect]:
        submission, output = request.submission, request.output
        is_first = request.attempts == 0
        id = RequestId(self._gateway, serial, request.attempts)
        request.attempt = self._attempts.open(id, route, submission.deadline, now)
        recomputed = 0 if is_first else len(submission.token_ids) + len(output)
        request.attempts += 1
        request.tried.add(route.decode)
        submit = Submit(
            id,
            route.decode,
            submission.token_ids,
            tuple(output),
            request.sampling(),
            submission.deadline - now,
            route.prefill_endpoints,
            submission.cache_salt,
            submission.context,
        )
        return [Assigned(serial, route.decode, recomputed), Send(submit)]

    def _end(self, serial: int, reason: FinishReason, detail: str = "") -> list[Effect]:
        request = self._requests.pop(serial)
        return [Ended(serial, reason, detail, request.cached)]

    def _answer_unknown(self, message: Tokens | PromptLogprobs) -> list[Effect]:
        """An attempt that was given up with its worker, which has come back: stop it."""
        self.stale["tokens_unknown"] += 1
        if message.request.gateway != self._gateway:
            return []
        return [Send(Cancel(message.request, message.worker, "unknown"))]

    def check_invariants(self) -> None:
        """Raises AssertionError when the tables contradict each other."""
        assert len(self._requests) <= self._requests_max
        self._attempts.check_invariants()
        current = {r.attempt.id for r in self._requests.values() if r.attempt is not None}
        assert self._attempts.running() == current
        for serial, request in self._requests.items():
            request.check_invariants(serial)
