"""Log probabilities, grammars and penalties on their way over both workers, and time running out
in every state of a request."""

from __future__ import annotations

import logging

import msgspec
import pytest

from pdrt.context import RequestContext
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Grammar, GrammarKind, Sampling
from tests.decode.deployment import SCHEDULER, Pair, Stream, deployed, prompt_of, until
from tests.prefill.executor import logprobs_of, output_of
from tests.transfer.copies import CopyGate

WORD = Grammar(GrammarKind.REGEX, "[a-z]+")


def scores_of(prompt: list[int], top: int) -> list[object]:
    return [logprobs_of(prompt, place, top) for place in range(1, len(prompt))]


# Log probabilities


async def test_each_token_has_its_logprobs(pair: Pair) -> None:
    prompt = prompt_of(10)
    stream = pair.submit(prompt, 6, logprobs=3)
    await stream.end()
    tokens = prompt + stream.tokens
    assert stream.logprobs == [logprobs_of(tokens, place, 3) for place in range(10, 16)]


async def test_nobody_asked(pair: Pair) -> None:
    stream = pair.submit(prompt_of(10), 6)
    await stream.end()
    assert (stream.logprobs, stream.scores) == ([], None)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 6])
@pytest.mark.parametrize("length", [1, 4, 10, 40])
async def test_prompt_logprobs_come_first_and_once(
    pair: Pair, max_tokens: int, length: int
) -> None:
    prompt = prompt_of(length)
    for _ in range(2):  # also when the prompt is cached
        stream = pair.submit(prompt, max_tokens, prompt_logprobs=2)
        assert (await stream.end()).reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt, max_tokens)
        assert stream.scores is not None
        assert list(stream.scores.logprobs) == scores_of(prompt, 2)
        assert stream.scores.prefill == pair.prefill.incarnation


async def test_a_first_token_that_stops_waits_for_the_prompts_logprobs(
    pair: Pair, copies: CopyGate
) -> None:
    prompt = prompt_of(10)
    (first,) = output_of(prompt, 1)
    copies.close()
    stream = pair.submit(prompt, 8, prompt_logprobs=0, stop_token_ids=(first,))
    await until(lambda: pair.prefill_executor.steps, "prefill")
    await pair.gateway.inspect(pair.decode.incarnation)
    assert (stream.tokens, stream.scores, stream.finished) == ([], None, None)
    copies.open()
    assert (await stream.end()).reason is FinishReason.STOP
    assert stream.tokens == [first]
    assert stream.scores is not None


async def test_a_room_that_fails_before_has_told_nothing(pair: Pair, copies: CopyGate) -> None:
    """Its first token too is taken back, and comes again with the next room."""
    prompt = prompt_of(10)
    copies.failures = 1
    stream = pair.submit(prompt, 5, prompt_logprobs=1, logprobs=0)
    assert (await stream.end()).reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt, 5)
    assert len(stream.logprobs) == 5
    assert len(stream.prefills) == 1
    assert stream.scores is not None
    assert list(stream.scores.logprobs) == scores_of(prompt, 1)


async def test_a_preempted_request_does_not_ask_again() -> None:
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        prompts = [prompt_of(20, salt) for salt in range(3)]
        streams = await pair.submit_together(prompts, 60, prompt_logprobs=1, logprobs=1)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream.end()).reason is FinishReason.LENGTH
            assert stream.scores is not None
            assert list(stream.scores.logprobs) == scores_of(prompt, 1)
            tokens = prompt + stream.tokens
            assert stream.logprobs == [logprobs_of(tokens, place, 1) for place in range(20, 80)]
        assert any(len(stream.prefills) > 1 for stream in streams), "somebody came back"


async def test_the_client_leaves_before_its_prompt_is_scored(pair: Pair, copies: CopyGate) -> None:
    copies.close()
    stream = pair.submit(prompt_of(10), 5, prompt_logprobs=1)
    await until(lambda: pair.prefill_executor.steps, "prefill")
    pair.cancel(stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED
    copies.open()
    await pair.deployment.quiet()
    assert stream.scores is None


# What the tokens so far decide


async def test_history_is_what_the_pages_hold() -> None:
    """The stand-in compares the two, in every step and after every preemption."""
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        prompts = [prompt_of(20, salt) for salt in range(3)]
        streams = await pair.submit_together(prompts, 60, presence_penalty=0.5)
        for prompt, stream in zip(prompts, streams, strict=True):
            await stream.end()
            assert stream.tokens == output_of(prompt, 60)
        assert any(len(stream.prefills) > 1 for stream in streams)


async def test_one_matcher_for_as_long_as_the_request_is_here() -> None:
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        prompts = [prompt_of(20, salt) for salt in range(3)]
        streams = await pair.submit_together(prompts, 60, grammar=WORD)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream.end()).reason is FinishReason.LENGTH
            assert stream.tokens == output_of(prompt, 60)
        assert any(len(stream.prefills) > 1 for stream in streams)
        shown = {id(row.matcher) for rows in pair.decode_executor.steps for row in rows}
        assert len(shown) == 3


async def test_a_sequence_waits_for_its_matcher(pair: Pair) -> None:
    pair.decode_executor.grammars.gate.clear()
    stream = pair.submit(prompt_of(10), 6, grammar=WORD)
    await until(lambda: pair.decode.scheduler.running, "a sequence")
    other = pair.submit(prompt_of(9, 1), 6)
    await other.end()
    assert len(stream.tokens) == 1, "prefill has a matcher of its own"
    pair.decode_executor.grammars.gate.set()
    await stream.end()
    assert stream.tokens == output_of(prompt_of(10), 6)


async def test_a_matcher_that_comes_too_late(pair: Pair) -> None:
    pair.decode_executor.grammars.gate.clear()
    stream = pair.submit(prompt_of(10), 6, grammar=WORD)
    await until(lambda: pair.decode.scheduler.running, "a sequence")
    pair.cancel(stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED
    pair.decode_executor.grammars.gate.set()
    await pair.serves()


@pytest.mark.parametrize("first", ["decode", "prefill"])
async def test_a_grammar_that_cannot_be_compiled(pair: Pair, first: str) -> None:
    """Whoever finds out first says so; the other one has nothing more to say."""
    executors = {"decode": pair.decode_executor, "prefill": pair.prefill_executor}
    del executors[first]
    (slow,) = executors.values()
    slow.grammars.gate.clear()
    stream = pair.submit(prompt_of(10), 6, grammar=Grammar(GrammarKind.REGEX, "no"))
    finished = await stream.end()
    assert finished.reason is FinishReason.REJECTED
    assert finished.detail
    assert (first == "prefill") or finished.detail.startswith("regex: ")
    slow.grammars.gate.set()
    await pair.serves()
    assert stream.finishes == 1


async def test_a_grammar_that_cannot_be_followed_any_further() -> None:
    """The token of that step is not the model's, and is told to nobody."""
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=4)
    async with deployed(scheduler=scheduler) as pair:
        stream = pair.submit(prompt_of(10), 60, grammar=WORD)
        other = pair.submit(prompt_of(9, 1), 60)
        await stream.reach(4)
        pair.decode.grammars.matcher(stream.request).failure = "its matching takes too long"
        for each in (stream, other):
            pair.gateway.credit(pair.decode.incarnation, each, 60)
        finished = await stream.end()
        assert finished.reason is FinishReason.REJECTED
        assert finished.detail == "its matching takes too long"
        assert stream.tokens == output_of(prompt_of(10), 4)
        assert (await other.end()).reason is FinishReason.LENGTH
        await pair.serves()


# Time


async def overdue(pair: Pair, stream: Stream) -> None:
    """Its time is up now."""
    pair.decode.scheduler.requests[stream.request].deadline = 0.0
    finished = await stream.end()
    assert finished.reason is FinishReason.DEADLINE
    assert finished.detail == "its time is up"


async def test_time_is_up_while_queued() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, max_num_seqs=1)
    async with deployed(scheduler=scheduler) as pair:
        pair.prefill_executor.gate.clear()
        first, second = pair.submit(prompt_of(5), 2), pair.submit(prompt_of(6), 2)
        await until(lambda: pair.decode.scheduler.queued == 1, "the queue")
        await overdue(pair, second)
        pair.prefill_executor.gate.set()
        await first.end()


async def test_time_is_up_while_prefilling(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(10), 5)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    await overdue(pair, stream)
    pair.prefill_executor.gate.set()


async def test_time_is_up_while_its_first_token_is_kept_back(pair: Pair, copies: CopyGate) -> None:
    copies.close()
    stream = pair.submit(prompt_of(10), 5, prompt_logprobs=1)
    await until(lambda: pair.prefill_executor.steps, "prefill")
    await overdue(pair, stream)
    copies.open()


async def test_time_is_up_while_it_waits_for_its_grammar(pair: Pair) -> None:
    pair.decode_executor.grammars.gate.clear()
    stream = pair.submit(prompt_of(10), 6, grammar=WORD)
    await until(lambda: pair.decode.scheduler.running, "a sequence")
    await overdue(pair, stream)
    pair.decode_executor.grammars.gate.set()


async def test_time_is_up_during_a_step(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(10), 6)
    await until(lambda: pair.decode_executor.is_running, "a step")
    request = pair.decode.scheduler.requests[stream.request]
    request.deadline = 0.0
    await until(lambda: request.ended, "the deadline")
    pair.decode_executor.gate.set()
    await stream.end()
    assert stream.finished is not None
    assert stream.finished.reason is FinishReason.DEADLINE
    assert len(stream.tokens) == 1


async def test_time_is_up_while_its_client_does_not_read() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=2)
    async with deployed(scheduler=scheduler) as pair:
        stream = pair.submit(prompt_of(10), 6)
        await stream.reach(2)
        await overdue(pair, stream)


# What is said of it


async def test_a_stop_string_is_a_stop(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdrt.decode")
    pair.decode_executor.gate.clear()
    context = RequestContext(request_id="of the client")
    sampling = Sampling(max_tokens=50, temperature=0.0)
    worker = pair.decode.incarnation
    stream = pair.gateway.submit(worker, prompt_of(10), sampling, context=context)
    await stream.reach(1)
    pair.gateway.cancel(worker, stream, "stop_string")
    pair.decode_executor.gate.set()
    await stream.end()
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert (line.outcome, line.request_id) == ("stop", "of the client")  # type: ignore[attr-defined]
    assert 'outcome="stop"' in pair.decode.view.render().decode()


async def test_the_context_goes_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[RequestContext] = []
    judge = pair.prefill.handover.judge
    monkeypatch.setattr(
        pair.prefill.handover,
        "judge",
        lambda grant: (contexts.append(grant.context), judge(grant))[1],
    )
    context = RequestContext("one", "00-" + "1" * 32 + "-" + "2" * 16 + "-01")
    sampling = Sampling(max_tokens=2, temperature=0.0)
    worker = pair.decode.incarnation
    await pair.gateway.submit(worker, prompt_of(10), sampling, context=context).end()
    assert contexts == [context]


async def test_tokens_of_each_step_are_told_before_the_next_one_ends(pair: Pair) -> None:
    """What a step has yielded is told while the next one runs, not after it."""
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(10), 6)
    for count in range(1, 6):
        await stream.reach(count)
        assert len(stream.tokens) == count
        await until(lambda: pair.decode_executor.is_running, "the next step")
        pair.decode_executor.gate.step()
    await stream.end()
    assert stream.tokens == output_of(prompt_of(10), 6)
