"""A request's life over both workers: what the client gets, and that every page comes back."""

from __future__ import annotations

import math

import msgspec
import pytest

from pdrt.kv.pages import Owner, OwnerKind
from pdrt.protocol.codec import encode
from pdrt.protocol.gateway_messages import FinishReason, Usage
from pdrt.sampling import Sampling
from tests.decode.deployment import SCHEDULER, Pair, deployed, in_use, prompt_of, until
from tests.prefill.executor import output_of
from tests.transfer.copies import CopyGate


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
async def test_full_life(pair: Pair, length: int) -> None:
    prompt = prompt_of(length, salt=length)
    stream = pair.submit(prompt, max_tokens=9)
    finished = await stream.end()
    assert finished.reason is FinishReason.LENGTH
    assert finished.usage == Usage(length, 9)
    assert stream.tokens == output_of(prompt, 9)
    assert stream.finishes == 1
    metrics = pair.decode.view.render().decode()
    for phase in ("queued", "prefill", "transfer", "decode"):
        assert f'phase="{phase}"' in metrics


async def test_many_at_once(pair: Pair) -> None:
    prompts = [prompt_of(1 + salt % 13, salt) for salt in range(40)]
    streams = [pair.submit(prompt, 1 + len(prompt)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        finished = await stream.end()
        assert finished.reason is FinishReason.LENGTH
        assert stream.tokens == output_of(prompt, 1 + len(prompt))


async def test_first_token_is_streamed_before_the_transfer(pair: Pair, copies: CopyGate) -> None:
    copies.close()
    prompt = prompt_of(10)
    stream = pair.submit(prompt, 3)
    await stream.reach(1)
    assert stream.tokens == output_of(prompt, 1)
    assert stream.finished is None
    assert in_use(pair.decode.pages, OwnerKind.LEASE) == 3
    assert not pair.decode_executor.steps
    copies.open()
    await stream.end()
    assert stream.tokens == output_of(prompt, 3)


async def test_one_token_needs_no_pages(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(9), max_tokens=1)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    assert pair.decode.pages.count(OwnerKind.FREE) == pair.decode.pages.total
    pair.prefill_executor.gate.set()
    finished = await stream.end()
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(9, 1))
    assert stream.tokens == output_of(prompt_of(9), 1)
    assert not pair.decode_executor.steps


async def test_no_token_at_all(pair: Pair) -> None:
    stream = pair.submit(prompt_of(9), max_tokens=0)
    finished = await stream.end()
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(9, 0))
    assert stream.tokens == []
    assert not pair.decode_executor.steps


async def test_an_attempt_that_has_every_token_already(pair: Pair) -> None:
    """The attempt before it was lost between its last token and its end."""
    earlier = output_of(prompt_of(9), 4)
    stream = pair.gateway.submit(
        pair.decode.incarnation,
        prompt_of(9),
        Sampling(max_tokens=4, temperature=0.0),
        earlier=earlier,
    )
    finished = await stream.end()
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(9, 4))
    assert stream.tokens == []
    assert not pair.decode_executor.steps


@pytest.mark.parametrize("done", [1, 2, 5, 7])
async def test_an_attempt_goes_on_where_the_one_before_stopped(pair: Pair, done: int) -> None:
    prompt, wanted = prompt_of(9), output_of(prompt_of(9), 8)
    stream = pair.gateway.submit(
        pair.decode.incarnation,
        prompt,
        Sampling(max_tokens=8, temperature=0.0),
        earlier=wanted[:done],
    )
    finished = await stream.end()
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(9, 8))
    assert stream.tokens == wanted[done:]


@pytest.mark.parametrize("index", [0, 1, 3])
async def test_a_stop_token_ends_it(pair: Pair, index: int) -> None:
    wanted = output_of(prompt_of(11), 8)
    stream = pair.submit(prompt_of(11), 8, stop_token_ids=(wanted[index],))
    finished = await stream.end()
    assert finished.reason is FinishReason.STOP
    assert stream.tokens == wanted[: index + 1]


async def test_the_models_limit_ends_it(pair: Pair) -> None:
    stream = pair.submit(prompt_of(93), max_tokens=50)
    finished = await stream.end()
    assert finished.reason is FinishReason.LENGTH
    assert stream.tokens == output_of(prompt_of(93), 3)


@pytest.mark.parametrize(
    ("length", "why"), [(0, "empty"), (96, "limit"), (97, "limit"), (500, "limit")]
)
async def test_what_cannot_be_served_is_rejected(pair: Pair, length: int, why: str) -> None:
    finished = await pair.submit(prompt_of(length)).end()
    assert finished.reason is FinishReason.REJECTED
    assert why in finished.detail
    await pair.serves()


@pytest.mark.parametrize("token", [1000, 2**40])
async def test_tokens_outside_of_the_vocabulary_are_rejected(pair: Pair, token: int) -> None:
    finished = await pair.submit([1, token, 2]).end()
    assert finished.reason is FinishReason.REJECTED
    await pair.serves()


async def test_a_bad_output_token_is_rejected(pair: Pair) -> None:
    sampling = Sampling(max_tokens=4, temperature=0.0)
    stream = pair.gateway.submit(pair.decode.incarnation, [1, 2], sampling, earlier=[5000])
    assert (await stream.end()).reason is FinishReason.REJECTED
    await pair.serves()


async def test_a_prompt_too_long_for_the_prefill_pool_is_rejected() -> None:
    async with deployed(prefill_pages=8) as pair:
        finished = await pair.submit(prompt_of(33)).end()
        assert finished.reason is FinishReason.REJECTED
        assert "prefill pool" in finished.detail
        await pair.serves(prompt_of(32))


async def test_a_prompt_too_long_for_the_decode_pool_is_rejected() -> None:
    async with deployed(decode_pages=8) as pair:
        finished = await pair.submit(prompt_of(32)).end()
        assert finished.reason is FinishReason.REJECTED
        await pair.serves()


async def test_a_full_queue_is_overloaded() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, max_num_seqs=1, queue_max=2)
    async with deployed(scheduler=scheduler) as pair:
        pair.prefill_executor.gate.clear()
        streams = [pair.submit(prompt_of(5), 2)]
        await until(lambda: pair.prefill_executor.is_running, "prefill")
        streams += [pair.submit(prompt_of(5, salt), 2) for salt in range(3)]
        assert (await streams[3].end()).reason is FinishReason.OVERLOADED
        pair.prefill_executor.gate.set()
        for stream in streams[:3]:
            assert (await stream.end()).reason is FinishReason.LENGTH


async def test_a_submit_that_comes_twice_counts_once(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(5), 4)
    pair.gateway.send(pair.decode.incarnation, encode(stream.submit))
    await until(lambda: pair.decode.table.stale["submit_again"], "the second Submit")
    pair.prefill_executor.gate.set()
    await stream.end()
    await pair.serves()
    assert stream.finishes == 1
    assert stream.tokens == output_of(prompt_of(5), 4)


async def test_a_stream_that_is_not_read_pauses_and_resumes() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=3)
    async with deployed(scheduler=scheduler) as pair:
        slow = pair.submit(prompt_of(6), 10)
        await slow.reach(3)
        # Others go on: three tokens and no more until somebody takes them.
        other = pair.submit(prompt_of(7), 3)
        await other.end()
        assert len(slow.tokens) == 3
        steps = len(pair.decode_executor.steps)
        pair.gateway.credit(pair.decode.incarnation, slow, 2)
        await slow.reach(5)
        # An older credit takes nothing back.
        pair.gateway.credit(pair.decode.incarnation, slow, 1)
        await pair.gateway.inspect(pair.decode.incarnation)
        assert len(slow.tokens) == 5
        assert len(pair.decode_executor.steps) == steps + 2
        pair.gateway.credit(pair.decode.incarnation, slow, 10)
        await slow.end()
        assert slow.tokens == output_of(prompt_of(6), 10)


async def test_inspection_shows_state_and_checks_it(pair: Pair) -> None:
    pair.prefill_executor.gate.clear()
    stream = pair.submit(prompt_of(9))
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    decode = await pair.gateway.inspect(pair.decode.incarnation)
    prefill = await pair.gateway.inspect(pair.prefill.incarnation)
    assert decode.broken == prefill.broken == ()
    assert msgspec.json.decode(decode.status)["pages"]["lease"] == 3
    assert msgspec.json.decode(prefill.status)["pages"]["room"] == 3
    assert b"pdrt_pages" in decode.metrics
    pair.prefill_executor.gate.set()
    await stream.end()


async def test_inspection_names_what_is_broken(pair: Pair) -> None:
    pair.decode._checked_at = math.inf  # what it found by itself would end it
    thief = Owner(OwnerKind.SEQUENCE, "nobody")
    stolen = pair.decode.pages.take(1, thief)
    report = await pair.gateway.inspect(pair.decode.incarnation)
    assert len(report.broken) == 1
    pair.decode.pages.free(stolen, thief)
    assert (await pair.gateway.inspect(pair.decode.incarnation)).broken == ()
