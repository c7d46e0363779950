"""Traces of requests that ask for log probabilities: of the prompt once, of tokens with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdrt.context import RequestContext
from pdrt.gateway.effects import Assigned, Deliver, DeliverPrompt, Effect, Ended, Send
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import (
    Cancel,
    FinishReason,
    PromptLogprobs,
    Submit,
    Tokens,
    Usage,
)
from pdrt.sampling import TokenLogprobs
from tests.gateway.test_requests import A, B, C, World, finished, request_id, submission

ONE, TWO, THREE = (TokenLogprobs(-1.0 - i, i + 1) for i in range(3))
OF_PROMPT = (ONE, TWO)
"""The prompt has three tokens."""
P = Incarnation(77)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.requests.check_invariants()


def prompt(
    attempt: int = 0,
    worker: Incarnation = A,
    logprobs: tuple[TokenLogprobs, ...] = OF_PROMPT,
    cached: int = 0,
) -> PromptLogprobs:
    return PromptLogprobs(request_id(attempt=attempt), worker, logprobs, cached, P)


def tokens(
    first: int, ids: tuple[int, ...], attempt: int = 0, worker: Incarnation = A, **more: Any
) -> Tokens:
    return Tokens(request_id(attempt=attempt), worker, first, ids, **more)


def submitted(effects: list[Effect]) -> Submit:
    (submit,) = [e.message for e in effects if isinstance(e, Send) and type(e.message) is Submit]
    assert isinstance(submit, Submit)
    return submit


def test_output_is_held_back_until_the_prompts_are_there(world: World) -> None:
    assert submitted(world.open(prompt_logprobs=1)).sampling.prompt_logprobs == 1
    assert world.requests.on_tokens(tokens(0, (10,)), 1.0) == []
    assert world.requests.on_tokens(tokens(1, (11,)), 1.0) == []
    world.requests.check_invariants()
    assert world.requests.on_prompt_logprobs(prompt(cached=2), 2.0) == [
        DeliverPrompt(1, OF_PROMPT, 2, P),
        Deliver(1, (10,), 0),
        Deliver(1, (11,), 0),
    ]
    assert world.requests.on_tokens(tokens(2, (12,)), 3.0) == [Deliver(1, (12,), 2)]
    end = finished(FinishReason.STOP, usage=Usage(3, 3, 2))
    assert world.requests.on_finished(end, 4.0) == [Ended(1, FinishReason.STOP, "", 2)]


def test_scoring_alone(world: World) -> None:
    world.open(prompt_logprobs=0, max_tokens=0)
    assert world.requests.on_prompt_logprobs(prompt(), 1.0) == [DeliverPrompt(1, OF_PROMPT, 0, P)]
    end = finished(FinishReason.LENGTH, usage=Usage(3, 0))
    assert world.requests.on_finished(end, 2.0) == [Ended(1, FinishReason.LENGTH)]


def test_a_worker_lost_in_between_leaves_nothing_behind(world: World) -> None:
    world.open(prompt_logprobs=1)
    world.requests.on_tokens(tokens(0, (10, 11)), 1.0)
    effects = world.requests.on_worker_lost(A, 2.0)
    again = submitted(effects)
    assert (again.output_token_ids, again.sampling.prompt_logprobs) == ((), 1)
    assert effects[0] == Assigned(1, B, 3)
    # The second worker may say anything: nobody has seen the first one's tokens.
    assert world.requests.on_tokens(tokens(0, (66,), attempt=1, worker=B), 3.0) == []
    assert world.requests.on_prompt_logprobs(prompt(attempt=1, worker=B), 3.0) == [
        DeliverPrompt(1, OF_PROMPT, 0, P),
        Deliver(1, (66,), 0),
    ]


def test_a_later_attempt_does_not_ask_again(world: World) -> None:
    world.open(prompt_logprobs=1, logprobs=0)
    world.requests.on_prompt_logprobs(prompt(), 1.0)
    world.requests.on_tokens(tokens(0, (10,), logprobs=(ONE,)), 1.0)
    again = submitted(world.requests.on_worker_lost(A, 2.0))
    assert again.output_token_ids == (10,)
    assert (again.sampling.prompt_logprobs, again.sampling.logprobs) == (None, 0)
    world.requests.on_prompt_logprobs(prompt(attempt=1, worker=B), 3.0)
    assert world.requests.stale == {"prompt_logprobs_again": 1}


def test_an_output_that_is_all_there_waits_for_the_prompts(world: World) -> None:
    world.open(prompt_logprobs=1, max_tokens=1)
    world.requests.on_tokens(tokens(0, (10,)), 1.0)
    again = submitted(world.requests.on_worker_lost(A, 2.0))
    assert (again.output_token_ids, again.sampling.max_tokens) == ((), 1)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_missing_at_the_end_is_a_gap(world: World, reason: FinishReason) -> None:
    world.open(prompt_logprobs=1)
    world.requests.on_tokens(tokens(0, (10,)), 1.0)
    again = submitted(world.requests.on_finished(finished(reason, usage=Usage(3, 1)), 2.0))
    assert (again.worker, again.output_token_ids) == (B, ())


def test_missing_everywhere_fails_the_request(world: World) -> None:
    world.open(prompt_logprobs=1)
    effects: list[Effect] = []
    for attempt, worker in enumerate((A, B, C)):
        end = finished(FinishReason.LENGTH, attempt=attempt, worker=worker)
        effects = world.requests.on_finished(end, 1.0)
    detail = "the log probabilities of the prompt are missing"
    assert effects == [Ended(1, FinishReason.FAILED, detail)]


@pytest.mark.parametrize("wrong", [(), (ONE,), (ONE, TWO, THREE)])
def test_a_wrong_number_of_them_is_not_taken(
    world: World, wrong: tuple[TokenLogprobs, ...]
) -> None:
    world.open(prompt_logprobs=1)
    effects = world.requests.on_prompt_logprobs(prompt(logprobs=wrong), 1.0)
    assert effects[0] == Send(Cancel(request_id(), A, "logprobs"))
    assert submitted(effects).worker == B


def test_unasked_for_they_change_nothing(world: World) -> None:
    world.open()
    assert world.requests.on_prompt_logprobs(prompt(), 1.0) == []
    assert world.requests.stale == {"prompt_logprobs_again": 1}


def test_of_a_cancelled_or_unknown_attempt_they_are_stale(world: World) -> None:
    world.open(prompt_logprobs=1)
    world.requests.abandon(1, "client_gone", 0.0)
    assert world.requests.on_prompt_logprobs(prompt(), 1.0) == []
    world.requests.on_finished(finished(FinishReason.CANCELLED), 2.0)
    assert world.requests.on_prompt_logprobs(prompt(), 3.0) == [
        Send(Cancel(request_id(), A, "unknown"))
    ]


def test_those_of_tokens_come_with_them_exactly_once(world: World) -> None:
    world.open(logprobs=0)
    first = tokens(0, (10, 11), logprobs=(ONE, TWO))
    assert world.requests.on_tokens(first, 1.0) == [Deliver(1, (10, 11), 0, (ONE, TWO))]
    assert world.requests.on_tokens(first, 1.0) == []
    overlap = tokens(1, (11, 12), logprobs=(TWO, THREE))
    assert world.requests.on_tokens(overlap, 1.0) == [Deliver(1, (12,), 0, (THREE,))]


@pytest.mark.parametrize("logprobs", [(), (ONE, TWO)])
def test_tokens_without_theirs_end_the_attempt(
    world: World, logprobs: tuple[TokenLogprobs, ...]
) -> None:
    world.open(logprobs=0)
    effects = world.requests.on_tokens(tokens(0, (10,), logprobs=logprobs), 1.0)
    assert effects[0] == Send(Cancel(request_id(), A, "logprobs"))
    assert submitted(effects).worker == B


def test_those_that_nobody_asked_for_end_the_attempt_too(world: World) -> None:
    world.open()
    effects = world.requests.on_tokens(tokens(0, (10,), logprobs=(ONE,)), 1.0)
    assert isinstance(effects[0], Send) and isinstance(effects[0].message, Cancel)


def test_salt_and_context_reach_every_attempt(world: World) -> None:
    context = RequestContext("mine")
    asked = msgspec.structs.replace(submission(), cache_salt="salt", context=context)
    first = submitted(world.requests.open(asked, 0.0)[1])
    second = submitted(world.requests.on_worker_lost(A, 1.0))
    for submit in (first, second):
        assert (submit.cache_salt, submit.context) == ("salt", context)
