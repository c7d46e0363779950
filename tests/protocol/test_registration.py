"""A worker's half of the gateway channel: who listens, who is gone."""

from __future__ import annotations

import pytest

from pdrt.config import ProtocolConfig
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Registered
from pdrt.protocol.registration import REGISTER_SECONDS_MIN, Registration

WORKER = Incarnation(0xD0)
GATEWAY = Incarnation(0xE0)
NEXT_GATEWAY = Incarnation(0xE1)
ENDPOINTS = ("tcp://127.0.0.1:7001",)


@pytest.fixture
def registration() -> Registration:
    return Registration("127.0.0.1:8001", WORKER, ProtocolConfig(), 0.0)


def answer(seq: int, gateway: Incarnation = GATEWAY, worker: Incarnation = WORKER) -> Registered:
    return Registered(gateway, worker, seq, ENDPOINTS)


def test_first_register_is_due_at_once_and_unanswered_ones_at_growing_pauses(
    registration: Registration,
) -> None:
    now, pauses = 0.0, []
    for _ in range(6):
        assert registration.is_due(now)
        registration.next_seq(now)
        start = now
        while not registration.is_due(now):
            now += 0.05
        pauses.append(now - start)
    assert pauses == pytest.approx([REGISTER_SECONDS_MIN, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.051)


def test_answer_names_the_gateway_and_the_prefill_endpoints(registration: Registration) -> None:
    assert registration.registered(answer(registration.next_seq(0.0)), 0.1) is None
    assert registration.gateway == GATEWAY
    assert registration.prefill_endpoints == ENDPOINTS
    assert registration.refusal is None


def test_answer_to_another_worker_or_an_old_or_future_register_changes_nothing(
    registration: Registration,
) -> None:
    seq = registration.next_seq(0.0)
    registration.registered(answer(seq), 0.1)
    later = registration.next_seq(1.0)
    for message in (
        answer(later, NEXT_GATEWAY, Incarnation(0xD1)),
        answer(seq, NEXT_GATEWAY),
        answer(later + 1, NEXT_GATEWAY),
    ):
        assert registration.registered(message, 1.1) is None
        assert registration.gateway == GATEWAY


def test_the_gateway_may_answer_again_with_other_endpoints(registration: Registration) -> None:
    seq = registration.next_seq(0.0)
    registration.registered(answer(seq), 0.1)
    assert registration.registered(Registered(GATEWAY, WORKER, seq, ()), 0.2) is None
    assert (registration.gateway, registration.prefill_endpoints) == (GATEWAY, ())
    stale = Registered(NEXT_GATEWAY, WORKER, seq, ENDPOINTS)
    assert registration.registered(stale, 0.3) is None, "another one never got this `Register`"
    assert (registration.gateway, registration.prefill_endpoints) == (GATEWAY, ())


def test_what_a_lost_gateway_said_again_does_not_bring_it_back(registration: Registration) -> None:
    seq = registration.next_seq(0.0)
    registration.registered(answer(seq), 0.0)
    for half in range(1, 14):
        registration.handle_timer(half / 2)
    assert registration.registered(answer(seq), 7.0) is None
    assert registration.gateway is None


def test_another_incarnation_makes_the_old_one_lost_once(registration: Registration) -> None:
    registration.registered(answer(registration.next_seq(0.0)), 0.1)
    message = answer(registration.next_seq(1.0), NEXT_GATEWAY)
    assert registration.registered(message, 1.1) == GATEWAY
    assert registration.registered(message, 1.1) is None
    assert registration.gateway == NEXT_GATEWAY


def test_silent_gateway_is_lost_and_asked_for_again(registration: Registration) -> None:
    registration.registered(answer(registration.next_seq(0.0)), 0.0)
    lost = [registration.handle_timer(half / 2) for half in range(1, 14)]
    assert [x for x in lost if x is not None] == [GATEWAY]
    assert registration.gateway is None
    assert registration.is_due(7.0)


def test_gateway_that_returns_with_the_same_incarnation_goes_on(
    registration: Registration,
) -> None:
    registration.registered(answer(registration.next_seq(0.0)), 0.0)
    for half in range(1, 14):
        registration.handle_timer(half / 2)
    assert registration.registered(answer(registration.next_seq(7.0)), 7.0) is None
    assert registration.gateway == GATEWAY


def test_worker_that_was_asleep_accuses_no_gateway(registration: Registration) -> None:
    registration.registered(answer(registration.next_seq(0.0)), 0.0)
    assert registration.handle_timer(600.0) is None
    assert registration.gateway == GATEWAY
