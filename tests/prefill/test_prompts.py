"""What rooms ask of the model besides KV: grammars, log probabilities, tokens so far; and the
deadlines of rooms that wait."""

from __future__ import annotations

import msgspec
import pytest

from pdrt.kv.pages import OwnerKind
from pdrt.protocol.messages import FirstToken, Grant, Outcome, Reason
from pdrt.sampling import Grammar, GrammarKind, Sampling
from tests.decode.deployment import until
from tests.prefill.executor import LAYOUT, StandInMatcher, logprobs_of, next_token
from tests.prefill.peer import DecodePeer, Prefill

GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]+")


def asking(
    peer: DecodePeer, serial: int, length: int, sampling: Sampling, output: int = 0
) -> Grant:
    grant = peer.make_grant(serial, length)
    return msgspec.structs.replace(grant, sampling=sampling, output_tokens=output)


def computed(prefill: Prefill) -> int:
    """Tokens of all steps so far."""
    return sum(len(row.token_ids) for rows in prefill.executor.steps for row in rows)


def grammar_of(text: str = GRAMMAR.text, max_tokens: int = 8) -> Sampling:
    return Sampling(max_tokens=max_tokens, grammar=Grammar(GrammarKind.REGEX, text))


# Grammars


async def test_the_last_token_waits_for_its_grammar_and_nothing_else_does(
    prefill: Prefill, peer: DecodePeer
) -> None:
    prefill.executor.grammars.gate.clear()
    grant = asking(peer, 1, 20, grammar_of())
    await peer.say(grant)
    await until(lambda: computed(prefill) == 19, "all but the last token")
    await peer.say(peer.make_grant(2, 7, (20, 21)))
    assert (await peer.drained(2)).outcome is Outcome.COMPLETE
    assert not [m for m in peer.heard if m.room.serial == 1]
    assert computed(prefill) == 19 + 7
    assert prefill.worker.scheduler.has_work
    prefill.executor.grammars.gate.set()
    drained = await peer.drained(1)
    assert drained.outcome is Outcome.COMPLETE
    assert drained.first is not None
    assert drained.first.token == next_token(grant.token_ids)
    peer.landed(grant)
    (row,) = prefill.executor.steps[-1]
    assert isinstance(row.matcher, StandInMatcher)
    assert row.matcher.grammar == GRAMMAR


async def test_a_resumed_request_has_its_output_followed_anew(
    prefill: Prefill, peer: DecodePeer
) -> None:
    grant = asking(peer, 1, 20, grammar_of(), output=6)
    await peer.say(grant)
    await peer.drained(1)
    (row,) = prefill.executor.steps[-1]
    assert isinstance(row.matcher, StandInMatcher)
    assert row.matcher.output == list(grant.token_ids[14:])


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_grammar_that_is_refused_ends_its_room(
    prefill: Prefill, peer: DecodePeer, is_late: bool
) -> None:
    if is_late:
        prefill.executor.grammars.gate.clear()
    await peer.say(asking(peer, 1, 20, grammar_of("no")))
    if is_late:
        await until(lambda: computed(prefill) == 19, "all but the last token")
        prefill.executor.grammars.gate.set()
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.REJECTED)
    assert (drained.retryable, drained.first) == (False, None)
    assert "has no words" in drained.detail


async def test_no_token_of_a_grammar_that_cannot_be_followed(
    prefill: Prefill, peer: DecodePeer
) -> None:
    """It would be an end that the grammar did not ask for."""
    await peer.say(asking(peer, 1, 20, grammar_of("lost")))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.REJECTED)
    assert (drained.retryable, drained.first) == (False, None)
    assert drained.detail == "the process is lost"
    assert not [m for m in peer.heard if isinstance(m, FirstToken)]
    await prefill.deployment.quiet()
    assert len(prefill.worker.cache) == 5, "its KV is sound"


async def test_no_grammar_is_compiled_where_nothing_is_sampled(
    prefill: Prefill, peer: DecodePeer
) -> None:
    prefill.executor.grammars.gate.clear()
    await peer.say(asking(peer, 1, 20, grammar_of(max_tokens=6), output=6))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.first) == (Outcome.COMPLETE, None)


@pytest.mark.parametrize("length", [1, 20])
async def test_a_room_that_waits_for_its_grammar_has_a_deadline(
    prefill: Prefill, peer: DecodePeer, length: int
) -> None:
    prefill.executor.grammars.gate.clear()
    grant = asking(peer, 1, length, grammar_of())
    await peer.say(msgspec.structs.replace(grant, seconds_max=0.05))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.reason) == (Outcome.ENDED, Reason.DEADLINE)
    assert not prefill.worker.scheduler.has_work
    prefill.executor.grammars.gate.set()
    await peer.say(peer.make_grant(2, 7))
    assert (await peer.drained(2)).outcome is Outcome.COMPLETE


async def test_a_room_that_waits_for_its_grammar_is_revoked(
    prefill: Prefill, peer: DecodePeer
) -> None:
    prefill.executor.grammars.gate.clear()
    await peer.say(asking(peer, 1, 20, grammar_of()))
    await until(lambda: 1 in {room.serial for room in prefill.worker.table.rooms}, "the room")
    await peer.revoke(1)
    assert (await peer.drained(1)).outcome is Outcome.ENDED
    await prefill.deployment.quiet()


async def test_a_room_that_waits_for_pages_has_a_deadline(
    prefill: Prefill, peer: DecodePeer
) -> None:
    prefill.executor.gate.clear()
    await peer.say(peer.make_grant(1, 96))
    await until(lambda: prefill.executor.is_running, "the first")
    await peer.say(msgspec.structs.replace(peer.make_grant(2, 96), seconds_max=0.05))
    assert (await peer.drained(2)).reason is Reason.DEADLINE
    assert prefill.worker.pages.count(OwnerKind.ROOM) == 24
    prefill.executor.gate.set()
    assert (await peer.drained(1)).outcome is Outcome.COMPLETE


# Log probabilities, and tokens so far


async def test_the_first_token_comes_with_its_log_probability(peer: DecodePeer) -> None:
    grant = asking(peer, 1, 7, Sampling(max_tokens=8, logprobs=2))
    await peer.say(grant)
    drained = await peer.drained(1)
    token = next_token(grant.token_ids)
    (first,) = [m for m in peer.heard if isinstance(m, FirstToken)]
    assert first.first.logprobs == logprobs_of([*grant.token_ids, token], 7, 2)
    assert drained.first == first.first
    assert drained.prompt_logprobs == ()


@pytest.mark.parametrize(
    ("length", "output"), [(1, 0), (2, 1), (16, 0), (17, 0), (40, 0), (40, 25)]
)
async def test_every_prompt_token_but_the_first_is_scored_once(
    prefill: Prefill, peer: DecodePeer, length: int, output: int
) -> None:
    """Output that the grant carries is no prompt, and what is cached is computed all the same."""
    sampling = Sampling(max_tokens=60, prompt_logprobs=3)
    for serial in (1, 2):
        grant = asking(peer, serial, length, sampling, output)
        grant = msgspec.structs.replace(grant, token_ids=peer.make_grant(0, length).token_ids)
        await peer.say(grant)
        drained = await peer.drained(serial)
        assert drained.outcome is Outcome.COMPLETE
        wanted = [logprobs_of(grant.token_ids, place, 3) for place in range(1, length - output)]
        assert list(drained.prompt_logprobs) == wanted
        assert drained.first is not None
        assert drained.first.cached_tokens == 0
    assert prefill.worker.cache.tokens["bypassed"] >= length


async def test_what_is_scored_sends_only_the_pages_wanted(peer: DecodePeer) -> None:
    grant = asking(peer, 1, 20, Sampling(max_tokens=8, prompt_logprobs=0))
    grant = msgspec.structs.replace(grant, pages=(7, 8), first_page=3)
    await peer.say(grant)
    drained = await peer.drained(1)
    assert (drained.outcome, drained.bytes_written) == (Outcome.COMPLETE, 2 * LAYOUT.page_bytes)
    assert len(drained.prompt_logprobs) == 19


async def test_a_prompt_is_scored_without_any_output_or_pages(peer: DecodePeer) -> None:
    grant = asking(peer, 1, 20, Sampling(max_tokens=0, prompt_logprobs=1))
    await peer.say(msgspec.structs.replace(grant, pages=()))
    drained = await peer.drained(1)
    assert (drained.outcome, drained.first, drained.bytes_written) == (Outcome.COMPLETE, None, 0)
    assert len(drained.prompt_logprobs) == 19


async def test_log_probabilities_that_no_frame_holds_are_refused(peer: DecodePeer) -> None:
    grant = asking(peer, 1, 90, Sampling(max_tokens=0, prompt_logprobs=20_000))
    await peer.say(msgspec.structs.replace(grant, pages=()))
    drained = await peer.drained(1)
    assert (drained.reason, drained.retryable) == (Reason.REJECTED, False)
    assert "ask for fewer alternatives" in drained.detail


async def test_a_prompt_that_fails_says_nothing_of_its_log_probabilities(
    prefill: Prefill, peer: DecodePeer
) -> None:
    prefill.executor.gate.clear()
    await peer.say(asking(peer, 1, 40, Sampling(max_tokens=8, prompt_logprobs=0)))
    await until(lambda: prefill.executor.is_running, "prefill")
    prefill.executor.gate.step()
    await until(lambda: len(prefill.executor.steps) == 2, "the second chunk")
    prefill.executor.failures = 1
    prefill.executor.gate.set()
    drained = await peer.drained(1)
    assert (drained.reason, drained.prompt_logprobs) == (Reason.FORWARD_FAILED, ())


async def test_whoever_needs_its_tokens_so_far_is_given_them(
    prefill: Prefill, peer: DecodePeer
) -> None:
    """The stand-in compares them with the KV of every position."""
    grant = asking(peer, 1, 40, Sampling(max_tokens=60, presence_penalty=0.5), output=9)
    await peer.say(grant)
    assert (await peer.drained(1)).outcome is Outcome.COMPLETE
    histories = [row.history for rows in prefill.executor.steps for row in rows]
    assert [len(history) for history in histories] == [0] * (len(histories) - 1) + [40]


async def test_no_output_tokens_beyond_the_prompt(peer: DecodePeer) -> None:
    await peer.say(asking(peer, 1, 7, Sampling(max_tokens=60), output=7))
    drained = await peer.drained(1)
    assert drained.reason is Reason.REJECTED
    assert "7 of 7 tokens are output" in drained.detail
