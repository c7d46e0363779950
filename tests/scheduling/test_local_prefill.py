"""Prompts that a decode worker computes itself: which of them, and how much of each in a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.config import SchedulerConfig
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Reason
from pdrt.scheduling.decode_request import DecodeRequest, End, LocalReason, RequestState
from pdrt.scheduling.local_prefill import (
    OTHER_WAY_EVERY,
    UNPAIRED_SECONDS,
    LocalPrefill,
    share_out,
)
from tests.scheduling.driver import STEP, Decode, preempted
from tests.scheduling.grants import LAYOUT, submit

ALONE, BESIDE = STEP

# Which


def policy(mode: str = "fallback", rooms_max: int = 3) -> LocalPrefill:
    return LocalPrefill(SchedulerConfig(local_prefill=mode), rooms_max, 0.0)  # type: ignore[arg-type]


def request(rooms_failed: int = 0) -> DecodeRequest:
    made = DecodeRequest(submit(1, 5), 0.0)
    made.rooms_failed = rooms_failed
    return made


@pytest.mark.parametrize("mode", ["fallback", "short"])
def test_nobody_there(mode: str) -> None:
    local, late = policy(mode), UNPAIRED_SECONDS
    assert local.why(request(), is_paired=False, now=late - 0.01) is None, "it may come yet"
    assert local.why(request(), is_paired=False, now=late) is LocalReason.UNPAIRED
    local.on_tick(is_paired=True, now=1.0)
    assert local.why(request(), is_paired=True, now=9.0) is None
    local.on_tick(is_paired=False, now=9.0)
    assert local.why(request(), is_paired=False, now=9.1) is None
    local.on_tick(is_paired=False, now=9.2)
    assert local.unpaired_seconds(9.5) == pytest.approx(0.5)
    assert local.why(request(), is_paired=False, now=9.0 + late) is LocalReason.UNPAIRED


def test_rooms_used_up() -> None:
    local = policy(rooms_max=2)
    assert local.why(request(1), is_paired=True, now=0.0) is None
    assert local.why(request(2), is_paired=True, now=0.0) is LocalReason.ROOMS_FAILED
    assert local.goes_on(request(2), Reason.WRITE_FAILED)
    assert local.goes_on(request(1), Reason.FORWARD_FAILED)
    assert not local.goes_on(request(2), Reason.FORWARD_FAILED), "it would fail here too"


def test_switched_off() -> None:
    local = policy("off")
    assert not local.is_on
    assert local.why(request(9), is_paired=False, now=99.0) is None
    assert local.goes_on(request(2), Reason.WRITE_FAILED)
    assert not local.goes_on(request(3), Reason.WRITE_FAILED)


def test_short_ones_only_where_that_is_asked_for() -> None:
    assert policy("fallback").short_tokens_max == 0
    assert policy("short").short_tokens_max == SchedulerConfig().local_prefill_short_tokens


def test_short_ones_go_the_quicker_way() -> None:
    """Each way is tried once; then the quicker one is taken, and now and then the other."""
    local = policy("short")
    assert local.takes_short()
    local.computed_here(0.020)
    assert not local.takes_short()
    local.handed_over(0.030)
    rest = [local.takes_short() for _ in range(OTHER_WAY_EVERY)]
    assert rest.count(False) == 1
    for _ in range(20):
        local.computed_here(0.050)  # others decode here now
    assert not local.takes_short()


# How much of each


@given(st.lists(st.integers(1, 50), max_size=6), st.integers(1, 40))
def test_shares(lacking: list[int], budget: int) -> None:
    given_ = share_out(lacking, budget)
    assert all(0 <= count <= lacks for count, lacks in zip(given_, lacking, strict=True))
    assert sum(given_) == min(budget, sum(lacking)), "nothing of a step is wasted"
    if lacking:
        assert given_[0] >= min(lacking[0], (budget + 1) // 2), "the oldest is not starved"


def test_the_shortest_first_beside_the_oldest() -> None:
    assert share_out([100, 30, 3, 9], 16) == [8, 0, 3, 5]
    assert share_out([4, 30, 3, 9], 16) == [4, 0, 3, 9]
    assert share_out([], 16) == []


# Steps


def begin(decode: Decode, serial: int, length: int, **sampling: object) -> DecodeRequest:
    made = decode.submit(serial, length, **sampling)
    assert decode.begin_here() is made
    assert made.state is RequestState.RUNNING
    return made


def parts(decode: Decode) -> dict[int, int]:
    """Tokens of each in the next step."""
    decode.plan()
    assert decode.step is not None
    return {r.request.serial: r.step_tokens for r in decode.step.sequences}


def test_a_prompt_alone_takes_whole_steps_and_then_decodes() -> None:
    decode = Decode()
    made = begin(decode, 1, ALONE + 5)
    assert len(made.pages) == LAYOUT.pages_for(ALONE + 6)
    assert parts(decode) == {1: ALONE}
    assert decode.finish_step() == {}, "no token before its prompt is computed"
    assert parts(decode) == {1: 5}
    assert decode.finish_step() == {1: None}
    assert (made.prefills_here, made.output_tokens) == (False, 1)
    assert parts(decode) == {1: 1}


def test_beside_sequences_that_decode_a_step_stays_short() -> None:
    decode = Decode()
    decode.run(1)
    begin(decode, 2, 20)
    assert parts(decode) == {1: 1, 2: BESIDE}
    assert decode.step is not None
    assert (decode.step.tokens, decode.step.prompt_tokens) == (1 + BESIDE, BESIDE)


def test_a_prompt_of_one_token() -> None:
    decode = Decode()
    begin(decode, 1, 1)
    assert parts(decode) == {1: 1}
    assert decode.finish_step() == {1: None}


def test_output_so_far_is_computed_with_the_prompt() -> None:
    decode = Decode()
    made = decode.submit(1, 5, output=[7, 8, 9])
    decode.begin_here()
    assert parts(decode) == {1: 8}
    assert decode.finish_step() == {1: None}
    assert made.output_tokens == 4


@pytest.mark.parametrize(("max_tokens", "tokens"), [(0, 0), (1, 1)])
def test_one_that_decodes_nothing_still_has_pages_for_its_prompt(
    max_tokens: int, tokens: int
) -> None:
    decode = Decode()
    made = begin(decode, 1, 8, max_tokens=max_tokens)
    assert len(made.pages) == LAYOUT.pages_for(8)
    decode.plan()
    assert decode.finish_step() == {1: FinishReason.LENGTH}
    assert made.output_tokens == tokens
    assert decode.kv.available == decode.pages.total


def test_what_is_cached_is_not_computed_again() -> None:
    decode = Decode()
    decode.like = 1
    begin(decode, 1, 13, max_tokens=1)
    decode.plan()
    decode.finish_step()
    second = begin(decode, 2, 13)
    assert second.cached_tokens == 12
    assert parts(decode) == {2: 1}
    decode.finish_step()
    third = begin(decode, 3, 12)
    assert third.cached_tokens == 8, "its last token is computed, and all of that page"


def test_scored_prompts_are_computed_whole() -> None:
    decode = Decode()
    decode.like = 1
    begin(decode, 1, 13, max_tokens=1)
    decode.plan()
    decode.finish_step()
    made = begin(decode, 2, 13, prompt_logprobs=1)
    assert made.cached_tokens == 0
    assert parts(decode) == {2: 13}


def test_the_last_token_waits_for_the_grammar() -> None:
    decode = Decode()
    made = begin(decode, 1, 9)
    made.awaits_grammar = True
    assert parts(decode) == {1: 8}
    assert decode.finish_step() == {}
    assert parts(decode) == {}
    decode.step = None
    made.awaits_grammar = False
    assert parts(decode) == {1: 1}
    assert decode.finish_step() == {1: None}


def test_a_client_that_does_not_read_pauses_it() -> None:
    decode = Decode(unread=2)
    made = decode.submit(1, 5, output=[7, 8, 9])
    made.tokens_taken = 0
    decode.begin_here()
    assert parts(decode) == {}
    made.tokens_taken = 2
    decode.step = None
    assert parts(decode) == {1: 8}


def test_the_youngest_prompt_gives_way_to_growth_and_keeps_what_it_has_computed() -> None:
    decode = Decode(pages=7)
    old = decode.run(1, length=7)
    young = begin(decode, 2, 15)
    assert parts(decode) == {1: 1, 2: BESIDE}
    decode.finish_step()
    decode.occupy(decode.kv.available)
    assert parts(decode) == {1: 1}
    assert preempted(decode) == [2]
    assert (young.state, young.pages, young.prefills_here) == (RequestState.QUEUED, (), False)
    assert decode.kv.uncached_tokens(young) == 15 - 4, "its full page"
    assert old.state is RequestState.RUNNING


def test_cancelled_in_a_step_it_stops_at_the_next_part() -> None:
    decode = Decode()
    made = begin(decode, 1, 40)
    decode.plan()
    made.ended = End(FinishReason.CANCELLED)
    decode.finish_step()
    assert parts(decode) == {}
    assert not decode.scheduler.requests
    assert decode.kv.available == decode.pages.total


def test_a_step_that_fails_costs_the_prompts_in_it_alone() -> None:
    decode = Decode()
    running = decode.run(1)
    begin(decode, 2, 20)
    assert parts(decode) == {1: 1, 2: BESIDE}
    computed = running.computed
    decode.fail_step()
    assert list(decode.scheduler.requests) == [running.request]
    assert running.computed == computed, "its last token is fed once more"
    assert parts(decode) == {1: 1}
    decode.fail_step()
    assert not decode.scheduler.requests, "no prompt is to blame"


def test_phases_name_what_it_was_doing() -> None:
    decode = Decode()
    made = begin(decode, 1, 5)
    decode.plan()
    decode.finish_step()
    made.end_last_phase(0.0)
    assert [phase.name for phase in made.phases] == ["queued", "prefill", "decode"]
    other = begin(decode, 2, 5)
    other.end_last_phase(0.0)
    assert [phase.name for phase in other.phases] == ["queued", "prefill"]
