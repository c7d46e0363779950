"""Traces of requests and their attempts: events in, effects out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from pdrt.config import GatewayConfig, ProtocolConfig
from pdrt.gateway.attempts import AttemptEvent, Attempts, AttemptState
from pdrt.gateway.effects import Assigned, Deliver, Effect, Ended, Send, Submission
from pdrt.gateway.prefix_index import Prompt
from pdrt.gateway.requests import Requests
from pdrt.gateway.router import Demand, Route
from pdrt.ids import Incarnation, RequestId
from pdrt.protocol.gateway_messages import (
    Cancel,
    Credit,
    Finished,
    FinishReason,
    Submit,
    Tokens,
    Usage,
)
from pdrt.sampling import Sampling
from tests.gateway.workers import GATEWAY

A, B, C = Incarnation(1), Incarnation(2), Incarnation(3)
PREFILL = "tcp://127.0.0.1:7001"
PREFILL_WORKER = Incarnation(7)
EOS = 2


class World:
    """Requests, and a router over a list of workers, in order of preference."""

    def __init__(self) -> None:
        self.workers = [A, B, C]
        self.demands: list[Demand] = []
        self.learnt: list[tuple[Incarnation | None, int]] = []
        self.cut_off = False
        self.requests = Requests(GATEWAY, GatewayConfig(requests_max=4, attempts_max=3), self)

    def learn(self, route: Route, prefill: Incarnation | None, cached_tokens: int) -> None:
        self.learnt.append((prefill, cached_tokens))

    def choose(
        self,
        demand: Demand,
        prompt: Prompt,
        tried: Collection[Incarnation],
        refused: Collection[Incarnation],
    ) -> Route | None:
        able = sorted((w for w in self.workers if w not in refused), key=lambda w: w in tried)
        return Route(able[0], (PREFILL,), PREFILL_WORKER) if able else None

    def is_cut_off(self) -> bool:
        return self.cut_off

    def open(self, **fields: Any) -> list[Effect]:
        return self.requests.open(submission(**fields), 0.0)[1]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.requests.check_invariants()


def submission(max_tokens: int = 100, deadline: float = 600.0, **sampling: Any) -> Submission:
    return Submission(
        (5, 6, 7), Sampling(max_tokens=max_tokens, **sampling), deadline, frozenset({EOS})
    )


def request_id(serial: int = 1, attempt: int = 0) -> RequestId:
    return RequestId(GATEWAY, serial, attempt)


def tokens(first: int, *ids: int, attempt: int = 0, worker: Incarnation = A) -> Tokens:
    return Tokens(request_id(attempt=attempt), worker, first, ids)


def finished(
    reason: FinishReason,
    attempt: int = 0,
    worker: Incarnation = A,
    usage: Usage | None = None,
    detail: str = "",
) -> Finished:
    return Finished(request_id(attempt=attempt), worker, reason, usage, detail)


def submit(output: tuple[int, ...], attempt: int, worker: Incarnation, seconds: float) -> Send:
    sampling = submission().sampling
    message = Submit(
        request_id(attempt=attempt), worker, (5, 6, 7), output, sampling, seconds, (PREFILL,)
    )
    return Send(message)


def cancel(reason: str, attempt: int = 0, worker: Incarnation = A) -> Send:
    return Send(Cancel(request_id(attempt=attempt), worker, reason))


def test_the_life_of_a_request(world: World) -> None:
    assert world.open() == [Assigned(1, A, 0), submit((), 0, A, 600.0)]
    assert world.requests.on_tokens(tokens(0, 10), 1.0) == [Deliver(1, (10,), 0)]
    assert world.requests.on_tokens(tokens(1, 11, 12), 2.0) == [Deliver(1, (11, 12), 0)]
    end = finished(FinishReason.STOP, usage=Usage(3, 3, 2))
    assert world.requests.on_finished(end, 3.0) == [Ended(1, FinishReason.STOP, "", 2)]
    assert len(world.requests) == world.requests.attempts == 0


def test_a_duplicate_is_dropped_and_an_overlap_is_cut(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, 10, 11), 1.0)
    assert world.requests.on_tokens(tokens(0, 10, 11), 1.0) == []
    assert world.requests.on_tokens(tokens(1, 11, 12), 1.0) == [Deliver(1, (12,), 0)]
    assert world.requests.stale == {"tokens_again": 2}


def test_a_gap_ends_the_attempt_and_the_next_continues(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    assert world.requests.on_tokens(tokens(2, 12), 2.0) == [
        cancel("gap"),
        Assigned(1, B, 4),
        submit((10,), 1, B, 598.0),
    ]
    assert world.requests.on_tokens(tokens(1, 11), 2.1) == []
    assert world.requests.on_finished(finished(FinishReason.CANCELLED), 2.2) == []
    assert world.requests.on_tokens(tokens(1, 11, attempt=1, worker=B), 2.3) == [
        Deliver(1, (11,), 0)
    ]


def test_tokens_missing_at_the_end_are_a_gap_too(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    end = finished(FinishReason.LENGTH, usage=Usage(3, 2))
    assert world.requests.on_finished(end, 2.0) == [Assigned(1, B, 4), submit((10,), 1, B, 598.0)]


def test_a_token_that_nobody_wanted_is_not_missed(world: World) -> None:
    world.open(max_tokens=0)
    assert world.requests.on_tokens(tokens(0, 10), 1.0) == []
    end = finished(FinishReason.LENGTH, usage=Usage(3, 1, 2))
    assert world.requests.on_finished(end, 2.0) == [Ended(1, FinishReason.LENGTH, "", 2)]


def test_a_lost_worker_is_replaced_and_what_it_still_says_is_stale(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    assert world.requests.on_worker_lost(A, 2.0) == [Assigned(1, B, 4), submit((10,), 1, B, 598.0)]
    # It was not dead: it is told to stop, and no token of it is taken.
    assert world.requests.on_tokens(tokens(1, 66), 3.0) == [cancel("unknown")]
    assert world.requests.on_finished(finished(FinishReason.STOP), 3.0) == []
    assert world.requests.stale == {
        "tokens_unknown": 1,
        "finished_unknown": 1,
    }


def test_attempts_are_bounded(world: World) -> None:
    world.open()
    world.requests.on_worker_lost(A, 1.0)
    world.requests.on_worker_lost(B, 2.0)
    assert world.requests.on_worker_lost(C, 3.0) == [
        Ended(1, FinishReason.UNAVAILABLE, "the decode worker was lost")
    ]


def test_an_output_that_is_all_there_needs_no_other_attempt(world: World) -> None:
    world.open(max_tokens=2)
    world.requests.on_tokens(tokens(0, 10, 11), 1.0)
    assert world.requests.on_worker_lost(A, 2.0) == [Ended(1, FinishReason.LENGTH)]
    world.open()
    world.requests.on_tokens(Tokens(request_id(2), A, 0, (10, EOS)), 3.0)
    assert world.requests.on_worker_lost(A, 4.0) == [Ended(2, FinishReason.STOP)]


@pytest.mark.parametrize("reason", [FinishReason.UNAVAILABLE, FinishReason.FAILED])
def test_workers_that_leave_after_they_served_do_not_use_up_the_attempts(
    world: World, reason: FinishReason
) -> None:
    world.workers = [Incarnation(number) for number in range(1, 8)]
    world.open()
    for attempt, worker in enumerate(world.workers[:-1]):
        world.requests.on_tokens(tokens(attempt, 10, attempt=attempt, worker=worker), 1.0)
        effects = world.requests.on_finished(finished(reason, attempt, worker), 1.0)
        if reason is FinishReason.FAILED and attempt == 2:
            assert effects == [Ended(1, FinishReason.FAILED)]
            return
        assert effects[0] == Assigned(1, world.workers[attempt + 1], 3 + attempt + 1)


def test_nor_do_workers_that_leave_before_they_served_or_were_never_reached(world: World) -> None:
    """As when several are killed and several restarted at once: each is asked once."""
    world.workers = [Incarnation(number) for number in range(1, 8)]
    world.open()
    for attempt, worker in enumerate(world.workers):
        if attempt % 2:
            effects = world.requests.on_undelivered(RequestId(GATEWAY, 1, attempt), 1.0)
        else:
            end = finished(FinishReason.UNAVAILABLE, attempt, worker)
            effects = world.requests.on_finished(end, 1.0)
        if worker is world.workers[-1]:
            assert effects == [Ended(1, FinishReason.UNAVAILABLE)]
        else:
            assert effects[0] == Assigned(1, world.workers[attempt + 1], 3)


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.UNAVAILABLE])
def test_a_worker_that_cannot_is_not_asked_again(world: World, reason: FinishReason) -> None:
    world.workers = [A, B]
    world.open()
    assert world.requests.on_finished(finished(reason), 1.0) == [
        Assigned(1, B, 3),
        submit((), 1, B, 599.0),
    ]
    end = finished(reason, attempt=1, worker=B, detail="no pages")
    assert world.requests.on_finished(end, 2.0) == [Ended(1, reason, "no pages")]


@pytest.mark.parametrize(
    "reason", [FinishReason.REJECTED, FinishReason.OVERLOADED, FinishReason.DEADLINE]
)
def test_what_no_other_worker_would_do_better_ends(world: World, reason: FinishReason) -> None:
    world.open()
    assert world.requests.on_finished(finished(reason, detail="why"), 1.0) == [
        Ended(1, reason, "why")
    ]


def test_no_worker_at_all(world: World) -> None:
    world.workers = []
    assert world.open() == [Ended(1, FinishReason.UNAVAILABLE, "no pair of workers can serve now")]


def test_an_undelivered_submit_goes_elsewhere_at_once(world: World) -> None:
    world.open()
    assert world.requests.on_undelivered(request_id(), 0.0) == [
        Assigned(1, B, 3),
        submit((), 1, B, 600.0),
    ]


def test_requests_are_bounded(world: World) -> None:
    for _ in range(4):
        world.open()
    (ended,) = world.open()
    assert isinstance(ended, Ended) and ended.reason is FinishReason.OVERLOADED


def test_cancelled_attempts_count_until_their_worker_answers(world: World) -> None:
    for serial in range(1, 9):
        assert len(world.open()) == 2
        world.requests.abandon(serial, "client_gone", 0.0)
    (ended,) = world.open()
    assert isinstance(ended, Ended) and ended.reason is FinishReason.OVERLOADED


def test_a_cancel_is_resent_ever_more_slowly_until_finished(world: World) -> None:
    world.open()
    assert world.requests.abandon(1, "client_gone", 0.0) == [cancel("client_gone")]
    assert world.requests.abandon(1, "client_gone", 0.0) == []
    times = []
    for step in range(1, 100):
        if effects := world.requests.on_tick(step / 10):
            assert effects == [cancel("client_gone")]
            times.append(step / 10)
    assert times == pytest.approx([0.2, 0.6, 1.4, 3.0, 5.0, 7.0, 9.0], abs=0.15)
    assert world.requests.on_finished(finished(FinishReason.CANCELLED), 10.0) == []
    assert world.requests.on_tick(20.0) == []
    assert world.requests.attempts == 0


def test_a_cancel_ends_with_its_worker_or_long_after_the_deadline(world: World) -> None:
    world.open()
    world.requests.abandon(1, "client_gone", 0.0)
    assert world.requests.on_worker_lost(A, 1.0) == []
    assert world.requests.attempts == 0
    world.open()
    world.requests.abandon(2, "client_gone", 0.0)
    assert world.requests.on_tick(611.0) == []
    assert world.requests.attempts == 0


def test_the_deadline_ends_the_request_here_and_there(world: World) -> None:
    world.open(deadline=5.0)
    world.requests.on_tick(4.9)
    assert world.requests.on_tick(5.0) == [
        cancel("deadline"),
        Ended(1, FinishReason.DEADLINE, "the request took too long"),
    ]


def test_credit_goes_out_by_strides_and_the_rest_in_a_pause(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, *range(100, 120)), 0.0)
    assert world.requests.take(1, 15, 0.0) == []
    assert world.requests.take(1, 16, 0.0) == [Send(Credit(request_id(), A, 16))]
    assert world.requests.take(1, 20, 0.0) == []
    assert world.requests.on_tick(0.1) == []
    assert world.requests.on_tick(0.3) == [Send(Credit(request_id(), A, 20))]
    assert world.requests.on_tick(0.6) == []


def test_what_is_not_taken_is_not_credited(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, *range(100, 190)), 0.0)
    assert world.requests.on_tick(0.1) == []
    assert world.requests.on_tick(1.1) == [Send(Credit(request_id(), A, 0))]


def test_a_silent_attempt_is_asked_by_a_repeated_credit(world: World) -> None:
    world.open()
    assert world.requests.on_tick(0.9) == []
    assert world.requests.on_tick(1.0) == [Send(Credit(request_id(), A, 0))]
    assert world.requests.on_tick(1.1) == []
    # The worker does not know the request: its Submit was lost.
    assert world.requests.on_finished(finished(FinishReason.UNAVAILABLE), 1.2) == [
        Assigned(1, B, 3),
        submit((), 1, B, 598.8),
    ]


def test_more_tokens_than_asked_for_are_dropped(world: World) -> None:
    world.open(max_tokens=2)
    assert world.requests.on_tokens(tokens(0, 10, 11, 12), 0.0) == [Deliver(1, (10, 11), 0)]
    assert world.requests.on_tokens(tokens(3, 13), 0.0)[0] == cancel("gap")


def test_cached_tokens_are_known_before_the_end(world: World) -> None:
    world.open()
    message = Tokens(request_id(), A, 0, (10,), cached_tokens=2)
    assert world.requests.on_tokens(message, 0.0) == [Deliver(1, (10,), 2)]


def test_shutdown_ends_all(world: World) -> None:
    world.open()
    assert world.requests.shut_down(1.0) == [
        cancel("shutdown"),
        Ended(1, FinishReason.UNAVAILABLE, "the gateway is shutting down"),
    ]


def test_demand_counts_attempts_and_first_tokens_awaited() -> None:
    attempts = Attempts(ProtocolConfig())
    attempt = attempts.open(request_id(), Route(A, (PREFILL,)), 600.0, 0.0)
    assert attempts.demand() == Demand({A: 1}, {PREFILL: 1})
    attempts.move(attempt, AttemptEvent.TOKENS)
    assert attempts.demand() == Demand({A: 1}, {})
    attempts.cancel(attempt, AttemptEvent.CANCEL, "client_gone", 0.0)
    assert attempts.demand() == Demand({A: 1}, {})
    attempts.move(attempt, AttemptEvent.FINISHED)
    assert attempts.demand() == Demand({}, {})
    attempts.check_invariants()


def test_an_unlisted_event_raises_and_changes_nothing() -> None:
    attempts = Attempts(ProtocolConfig())
    attempt = attempts.open(request_id(), Route(A, (PREFILL,)), 600.0, 0.0)
    with pytest.raises(KeyError):
        attempts.move(attempt, AttemptEvent.EXPIRED)
    assert attempt.state is AttemptState.RUNNING
    attempts.check_invariants()


# Without a decode worker


def begun(world: World) -> None:
    """One token is delivered, and its worker, the only one, is lost."""
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    world.workers = []
    assert world.requests.on_worker_lost(A, 2.0) == []
    assert (world.requests.waiting, world.requests.attempts) == (1, 0)


def test_one_that_has_begun_waits_and_goes_on_with_the_next_token(world: World) -> None:
    begun(world)
    assert world.requests.on_tick(3.0) == []
    world.requests.check_invariants()
    assert world.requests.take(1, 1, 3.0) == []
    world.workers = [B]
    assert world.requests.on_tick(4.0) == [Assigned(1, B, 4), submit((10,), 1, B, 596.0)]
    assert world.requests.waiting == 0
    assert world.requests.on_tick(4.3) == [Send(Credit(request_id(attempt=1), B, 1))]
    assert world.requests.on_tokens(tokens(1, 11, attempt=1, worker=B), 5.0) == [
        Deliver(1, (11,), 0)
    ]


def test_one_without_a_token_waits_too_once_it_was_taken(world: World) -> None:
    world.open()
    world.workers = []
    assert world.requests.on_worker_lost(A, 2.0) == []
    world.workers = [A]
    (assigned, _) = world.requests.on_tick(3.0)
    assert assigned == Assigned(1, A, 3), "the same one, come back"


def test_new_ones_are_refused_at_once_meanwhile(world: World) -> None:
    begun(world)
    assert world.open() == [Ended(2, FinishReason.UNAVAILABLE, "no pair of workers can serve now")]
    assert world.requests.waiting == 1


def test_the_wait_is_bounded(world: World) -> None:
    begun(world)
    assert world.requests.on_tick(61.9) == []
    assert world.requests.on_tick(62.2) == [
        Ended(1, FinishReason.UNAVAILABLE, "the decode worker was lost")
    ]
    assert len(world.requests) == 0


def test_looking_in_vain_does_not_prolong_it(world: World) -> None:
    begun(world)
    ends = [effects for step in range(20, 700) if (effects := world.requests.on_tick(step / 10))]
    assert len(ends) == 1
    assert len(world.requests) == 0


def test_the_deadline_ends_the_wait(world: World) -> None:
    world.open(deadline=5.0)
    world.workers = []
    world.requests.on_worker_lost(A, 2.0)
    assert world.requests.on_tick(5.0) == [
        Ended(1, FinishReason.DEADLINE, "the request took too long")
    ]


def test_a_client_that_goes_away_and_a_shutdown_end_the_wait(world: World) -> None:
    begun(world)
    assert world.requests.abandon(1, "client_gone", 3.0) == []
    assert len(world.requests) == 0
    world.workers = [A]
    world.open()
    world.workers = []
    world.requests.on_worker_lost(A, 4.0)
    assert world.requests.shut_down(5.0) == [
        Ended(2, FinishReason.UNAVAILABLE, "the gateway is shutting down")
    ]


def test_one_that_leaves_in_mid_answer_is_waited_for(world: World) -> None:
    """A drained worker that is the only one, and is started anew."""
    world.workers = [A]
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    assert world.requests.on_finished(finished(FinishReason.UNAVAILABLE), 2.0) == []
    world.workers = [A, B]
    (assigned, _) = world.requests.on_tick(3.0)
    assert assigned == Assigned(1, B, 4)


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.UNAVAILABLE])
def test_a_failure_is_not_waited_out(world: World, reason: FinishReason) -> None:
    """Nor one that was turned away before its first token."""
    world.workers = [A]
    world.open()
    if reason is FinishReason.FAILED:
        world.requests.on_tokens(tokens(0, 10), 1.0)
    assert world.requests.on_finished(finished(reason, detail="why"), 2.0) == [
        Ended(1, reason, "why")
    ]


def test_who_took_this_gateway_for_lost_may_go_on_with_it(world: World) -> None:
    world.workers = [A]
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    assert world.requests.on_finished(finished(FinishReason.CANCELLED), 2.0) == [
        Assigned(1, A, 4),
        submit((10,), 1, A, 598.0),
    ]


def test_held_output_is_given_up_while_it_waits(world: World) -> None:
    """Nobody has seen it, and the answer begins with what it waits for."""
    world.open(prompt_logprobs=0)
    world.requests.on_tokens(tokens(0, 10), 1.0)
    world.workers = []
    assert world.requests.on_worker_lost(A, 2.0) == []
    world.workers = [B]
    (_, sent) = world.requests.on_tick(3.0)
    assert isinstance(sent, Send) and isinstance(sent.message, Submit)
    assert sent.message.output_token_ids == ()


# Without a connection to one


def test_new_ones_wait_for_a_connection_that_is_dialled_again(world: World) -> None:
    world.workers, world.cut_off = [A], True
    world.open()
    world.workers = []
    assert world.requests.on_undelivered(request_id(), 0.0) == []
    assert world.open() == [], "nor is one turned away that comes now"
    assert world.requests.waiting == 2
    world.workers = [A]
    found = world.requests.on_tick(1.0)
    assert [e for e in found if isinstance(e, Assigned)] == [Assigned(1, A, 3), Assigned(2, A, 0)]


def test_that_wait_is_short(world: World) -> None:
    world.workers, world.cut_off = [], True
    assert world.open() == []
    assert world.requests.on_tick(2.9) == []
    assert world.requests.on_tick(3.2) == [
        Ended(1, FinishReason.UNAVAILABLE, "no pair of workers can serve now")
    ]


def test_it_ends_with_the_worker(world: World) -> None:
    """Who was cut off for being dead is lost by now."""
    world.workers, world.cut_off = [], True
    assert world.open() == []
    world.cut_off = False
    assert world.requests.on_tick(0.5) == [
        Ended(1, FinishReason.UNAVAILABLE, "no pair of workers can serve now")
    ]


def test_who_is_never_reached_is_asked_once_a_look(world: World) -> None:
    world.workers, world.cut_off = [A], True
    world.open()
    asked = 0
    for step in range(40):
        now = step / 10
        effects = world.requests.on_tick(now) if step else [Send(None)]  # type: ignore[arg-type]
        if any(isinstance(effect, Send) for effect in effects):
            number = RequestId(GATEWAY, 1, asked)
            asked += 1
            world.requests.on_undelivered(number, now)
    assert 2 < asked < 20
    assert len(world.requests) == 0, "the wait is not prolonged"


# Workers that hang


def test_what_a_hanging_decode_worker_has_goes_on_elsewhere(world: World) -> None:
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    world.workers = [B]
    assert world.requests.on_worker_hangs(A, 61.0) == [
        cancel("hangs"),
        Assigned(1, B, 4),
        submit((10,), 1, B, 539.0),
    ]
    assert world.requests.on_worker_hangs(A, 62.0) == [], "it is said with every heartbeat"
    assert world.requests.on_tokens(tokens(1, 11), 63.0) == [], "too late"


def test_so_does_what_waits_for_a_hanging_prefill_worker(world: World) -> None:
    """Where the first token has come, its part is done."""
    world.workers = [A]
    world.open()
    world.open()
    world.requests.on_tokens(tokens(0, 10), 1.0)
    world.workers = []
    assert world.requests.on_worker_hangs(PREFILL_WORKER, 61.0) == [
        Send(Cancel(request_id(2), A, "hangs"))
    ]
    assert world.requests.waiting == 1
    world.workers = [A]
    assert Assigned(2, A, 3) in world.requests.on_tick(62.0)


def test_a_request_that_hangs_every_worker_ends(world: World) -> None:
    world.open()
    ends: list[Effect] = []
    for number, worker in enumerate((A, B, C)):
        ends = world.requests.on_worker_hangs(worker, 61.0 * (number + 1))
    assert ends[-1] == Ended(1, FinishReason.UNAVAILABLE, "the worker that had it hangs")
