"""Cached prefixes on a decode worker: what is leased, held, kept and given back; and what is done
while a step runs."""

from __future__ import annotations

import pytest

from pdrt.kv.pages import Owner, OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Grammar, GrammarKind
from pdrt.scheduling.decode_request import DecodeRequest, End, RequestState
from pdrt.scheduling.step_plan import PagesWanted
from tests.scheduling.driver import Decode, preempted
from tests.scheduling.grants import room


def leased(decode: Decode, request: DecodeRequest) -> tuple[int, int, int]:
    """Of its room: (cached pages held, own pages, of these to be written)."""
    assert request.room is not None
    pages = decode.leases[request.room.serial]
    return len(pages.held), len(pages.own), pages.written


def run_and_end(decode: Decode, serial: int, length: int, output: int = 2) -> DecodeRequest:
    """A request from its submission to its end."""
    request = decode.run(serial, length, max_tokens=output)
    while request.request in decode.scheduler.requests:
        decode.plan()
        decode.finish_step()
    return request


# Rooms


@pytest.mark.parametrize(
    ("length", "wanted"),
    [
        # The first one has left two full pages, tokens 0 … 7.
        (3, (0, 1, 1)),
        (4, (1, 1, 0)),  # all of the prompt; a page for the token after it
        (7, (1, 1, 1)),
        (8, (2, 1, 0)),
        (9, (2, 1, 1)),
        (15, (2, 2, 2)),
        (16, (2, 3, 2)),
    ],
)
def test_only_what_is_missing_is_leased(length: int, wanted: tuple[int, int, int]) -> None:
    decode = Decode()
    run_and_end(decode, 1, 9)
    decode.like = 1
    second = decode.submit(2, length)
    assert decode.admit() is second
    assert leased(decode, second) == wanted
    assert decode.kv.cache.tokens == {"hit": 4 * wanted[0], "missed": 9 + length - 4 * wanted[0]}


def test_two_read_one_prefix_at_once() -> None:
    decode = Decode()
    decode.like = 1
    first, second = decode.run(1, 9), decode.run(2, 10)
    assert first.pages[:2] == second.pages[:2]
    assert set(first.pages[2:]).isdisjoint(second.pages[2:])
    decode.plan()
    decode.finish_step()
    decode.remove(first)
    decode.check()
    reader = Owner(OwnerKind.SEQUENCE, second.request)
    assert decode.pages.held_by(OwnerKind.SEQUENCE) == {reader: set(second.pages[:2])}


def test_the_output_is_kept_too() -> None:
    decode = Decode()
    first = run_and_end(decode, 1, 6, output=7)
    assert first.output_tokens == 7
    # 12 tokens have KV: the last one was never fed.
    decode.like = 1
    again = decode.submit(2, 6, first.tokens[6:])
    decode.admit()
    assert leased(decode, again) == (3, 1, 1)


@pytest.mark.parametrize(
    ("computed", "is_writable"), [(0, False), (7, False), (8, True), (9, True)]
)
def test_a_step_writes_into_nothing_that_others_read(computed: int, is_writable: bool) -> None:
    decode = Decode()
    request = decode.run(1, 9)
    assert (request.computed, len(request.pages)) == (9, 3)
    request.computed = computed
    assert decode.kv.is_writable(request) is is_writable


@pytest.mark.parametrize("steps", range(9))
def test_a_page_is_kept_once_its_last_token_has_been_fed(steps: int) -> None:
    """Not when it has only been sampled: its KV is not there yet."""
    decode = Decode()
    request = decode.run(1, 6)
    for _ in range(steps):
        decode.plan()
        decode.finish_step()
    assert (request.computed, len(request.tokens)) == (6 + steps, 7 + steps)
    decode.remove(request)
    assert len(decode.kv.cache) == (6 + steps) // 4


def test_salts_do_not_mix() -> None:
    decode = Decode()
    decode.salt = "red"
    run_and_end(decode, 1, 9)
    decode.like = 1
    for serial, salt, held in ((2, "blue", 0), (3, "", 0), (4, "red", 2)):
        decode.salt = salt
        request = decode.submit(serial, 9)
        decode.admit()
        assert leased(decode, request)[0] == held, salt


def test_without_a_cache_nothing_is_kept() -> None:
    decode = Decode(is_caching=False)
    run_and_end(decode, 1, 9)
    assert decode.pages.free_count == decode.pages.total
    decode.like = 1
    second = decode.submit(2, 9)
    decode.admit()
    assert leased(decode, second) == (0, 3, 3)
    assert second.keys == []


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_decodes_nothing_leases_and_holds_nothing(max_tokens: int) -> None:
    decode = Decode()
    run_and_end(decode, 1, 9)
    decode.like = 1
    second = decode.submit(2, 9, max_tokens=max_tokens)
    decode.admit()
    assert leased(decode, second) == (0, 0, 0)
    assert not decode.pages.held_by(OwnerKind.LEASE)
    assert decode.kv.cache.tokens["bypassed"] == 9


def test_a_failed_room_keeps_nothing_and_lets_go_at_its_end_only() -> None:
    decode = Decode()
    run_and_end(decode, 1, 9)
    cached = len(decode.kv.cache)
    decode.like = 1
    second = decode.submit(2, 17)
    decode.admit()
    decode.fail(second)
    # Its writer may still write: what is leased is leased, and what is held is held.
    assert decode.pages.count(OwnerKind.LEASE) == 3
    assert [len(pages) for pages in decode.pages.held_by(OwnerKind.LEASE).values()] == [2]
    assert decode.kv.available == decode.pages.total - 5
    decode.end_lease(decode.rooms)
    assert len(decode.kv.cache) == cached
    assert decode.kv.available == decode.pages.total


def test_a_room_that_does_not_fit_changes_nothing() -> None:
    decode = Decode(pages=8)
    run_and_end(decode, 1, 9)
    decode.occupy(3)
    decode.like = 1
    second = decode.submit(2, 17)
    before = decode.pages.counts()
    for spare, fits in ((1, False), (0, True)):
        wanted = decode.scheduler.pages_wanted(second)
        assert wanted == PagesWanted(5, 5)
        pages = decode.kv.lease(second, room(1), wanted, spare)
        assert (pages is not None) is fits
        if not fits:
            assert decode.pages.counts() == before
            assert not decode.pages.held_by(OwnerKind.LEASE)
            assert decode.kv.cache.tokens["hit"] == 0


def test_what_is_held_is_not_evicted_for_the_rest() -> None:
    """Its own prefix is the oldest in the cache: what it takes would go to it first."""
    decode = Decode(pages=8)
    run_and_end(decode, 1, 9)
    run_and_end(decode, 2, 17)
    decode.like = 1
    third = decode.submit(3, 20)
    assert decode.admit() is third
    assert leased(decode, third) == (2, 4, 3)
    decode.first_token(third)
    decode.ready(third)
    assert len(set(third.pages)) == 6


# Pressure


def test_idle_pages_are_evicted_and_read_ones_are_not() -> None:
    decode = Decode(pages=8)
    run_and_end(decode, 1, 13)
    decode.like = 2
    reader = decode.run(2, 9)
    prefix = reader.pages[:2]
    decode.like = None
    while decode.kv.available:
        decode.occupy(1)
    assert decode.kv.cache.match(reader.keys) == list(prefix)
    assert len(decode.kv.cache) == 2
    assert decode.plan() == [2]


def test_a_preempted_sequence_comes_back_to_its_own_pages() -> None:
    decode = Decode(pages=7)
    first = decode.run(1, 7)
    second = decode.run(2, 11)
    pages = second.pages
    assert decode.plan() == [1, 2]
    decode.finish_step()
    decode.occupy(decode.kv.available)
    assert decode.plan() == [1]
    assert preempted(decode) == [2]
    # The other one's growth has taken the end of it.
    assert decode.kv.cache.match(second.keys) == list(pages[:2])
    decode.finish_step()
    decode.remove(first)
    assert decode.admit() is second
    assert leased(decode, second) == (2, 2, 2)
    assert decode.leases[decode.rooms].held == pages[:2]


def test_a_failed_step_keeps_nothing() -> None:
    decode = Decode()
    first = decode.run(1, 7)
    for _ in range(6):
        decode.plan()
        decode.finish_step()
    assert first.computed == 13
    cached = len(decode.kv.cache)
    decode.plan()
    decode.fail_step()
    assert len(decode.kv.cache) == cached == 1, "only what the prefill worker has proved"
    assert decode.kv.available == decode.pages.total


def test_what_was_cancelled_in_a_step_is_kept() -> None:
    decode = Decode()
    first = decode.run(1, 7)
    decode.plan()
    first.ended = End(FinishReason.CANCELLED)
    assert decode.finish_step() == {}
    assert len(decode.kv.cache) == 2, "the step completed its second page"


# While a step runs


def test_pages_are_taken_ahead_of_the_end_of_a_step() -> None:
    decode = Decode()
    request = decode.run(1, 7)
    decode.plan()
    assert len(request.pages) == 2
    decode.grow_ahead()
    assert len(request.pages) == 3
    decode.grow_ahead()
    assert len(request.pages) == 3
    decode.finish_step()
    before = request.pages
    decode.plan()
    assert request.pages == before


def test_nothing_is_taken_ahead_for_a_last_token() -> None:
    decode = Decode()
    request = decode.run(1, 7, max_tokens=2)
    decode.plan()
    decode.grow_ahead()
    assert len(request.pages) == 2
    assert decode.finish_step() == {1: FinishReason.LENGTH}


def test_nobody_is_preempted_while_a_step_runs() -> None:
    decode = Decode(pages=4)
    first, second = decode.run(1, 7), decode.run(2, 7, max_tokens=2)
    assert decode.plan() == [1, 2]
    decode.grow_ahead()
    assert (len(first.pages), len(second.pages)) == (2, 2)
    # The younger one ends with the step: nobody has to give way.
    decode.finish_step()
    assert decode.plan() == [1]
    assert preempted(decode) == []


def test_who_joins_during_a_step_is_in_the_next_one() -> None:
    decode = Decode()
    decode.run(1)
    decode.plan()
    decode.grow_ahead()
    decode.run(2)
    decode.finish_step()
    assert decode.plan() == [1, 2]


def test_a_step_of_one_that_is_in_a_step_is_our_bug() -> None:
    decode = Decode()
    request = decode.run(1)
    decode.plan()
    with pytest.raises(AssertionError):
        decode.scheduler.plan(decode.kv, 0.0)
    with pytest.raises(AssertionError):
        decode.kv.release(request)
    with pytest.raises(AssertionError):
        decode.scheduler.requeue(request, 0.0)
    decode.check()


# What a request waits for


def test_without_its_grammar_it_computes_nothing() -> None:
    decode = Decode()
    request = decode.run(1, grammar=Grammar(GrammarKind.REGEX, "a+"))
    other = decode.run(2)
    assert decode.plan() == [2]
    decode.finish_step()
    request.awaits_grammar = False
    assert decode.plan() == [1, 2]
    assert other.state is RequestState.RUNNING


def test_prompt_logprobs_are_asked_for_until_they_are_there() -> None:
    decode = Decode()
    request = decode.submit(1, prompt_logprobs=3)
    assert decode.scheduler.room_sampling(request) is request.sampling
    request.awaits_scores = False
    asked = decode.scheduler.room_sampling(request)
    assert asked.prompt_logprobs is None
    assert asked.max_tokens == request.sampling.max_tokens
    plain = decode.submit(2)
    assert decode.scheduler.room_sampling(plain) is plain.sampling
