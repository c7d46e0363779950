"""Prefix caches over both workers: what is sent, what is read by several, and that every page is
free or cached in the end. The stand-in computes each token from what the pages hold, so that a
wrong page is a wrong token."""

from __future__ import annotations

import msgspec
import pytest

from pdrt.ids import RequestId
from pdrt.kv.pages import OwnerKind
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.protocol.messages import Grant
from pdrt.sampling import Sampling
from tests.decode.deployment import SCHEDULER, Pair, Stream, deployed, in_use, prompt_of, until
from tests.prefill.executor import output_of
from tests.transfer.copies import CopyGate

PROMPT = prompt_of(40)


class Grants:
    """Every grant that reaches the prefill worker."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Grant] = []
        judge = pair.prefill.handover.judge

        def look(grant: Grant) -> str | None:
            self.seen.append(grant)
            return judge(grant)

        monkeypatch.setattr(pair.prefill.handover, "judge", look)

    def last(self) -> tuple[int, int]:
        """(first page wanted, pages wanted)."""
        return self.seen[-1].first_page, len(self.seen[-1].pages)


@pytest.fixture
def grants(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Grants:
    return Grants(pair, monkeypatch)


async def right(stream: Stream) -> Stream:
    finished = await stream.end()
    assert finished.reason is FinishReason.LENGTH, finished
    prompt = stream.submit.token_ids
    assert stream.tokens == output_of(prompt, stream.submit.sampling.max_tokens)
    return stream


@pytest.mark.parametrize(
    ("length", "wanted"),
    [
        (8, (2, 0)),  # the whole prompt is here: nothing is sent
        (39, (9, 1)),
        (40, (10, 0)),
        (41, (10, 1)),
        (52, (10, 3)),
    ],
)
async def test_only_missing_pages_are_sent(
    pair: Pair, grants: Grants, length: int, wanted: tuple[int, int]
) -> None:
    await right(pair.submit(PROMPT, 3))
    assert grants.last() == (0, 10)
    await right(pair.submit((PROMPT + prompt_of(20, 5))[:length], 9))
    assert grants.last() == wanted


async def test_another_turn_of_a_conversation(pair: Pair, grants: Grants) -> None:
    """The output of the turn before is cached as well."""
    first = await right(pair.submit(PROMPT, 9))
    await right(pair.submit([*PROMPT, *first.tokens, 5, 6, 7], 9))
    assert grants.last() == (12, 1)


async def test_salts_are_apart(pair: Pair, grants: Grants) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0)
    for salt, wanted in (("a", (0, 10)), ("b", (0, 10)), ("a", (10, 0)), ("", (0, 10))):
        worker = pair.decode.incarnation
        await right(pair.gateway.submit(worker, PROMPT, sampling, cache_salt=salt))
        assert grants.last() == wanted
        assert grants.seen[-1].cache_salt == salt


async def test_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, enable_prefix_caching=False)
    async with deployed(scheduler=scheduler) as pair:
        grants = Grants(pair, monkeypatch)
        for _ in range(2):
            stream = await right(pair.submit(PROMPT, 3))
            assert grants.last() == (0, 10)
            assert stream.cached_tokens == 0
        assert pair.decode.pages.free_count == pair.decode.pages.total


async def test_what_is_said_of_the_cache(pair: Pair) -> None:
    first = await right(pair.submit(PROMPT, 3))
    second = await right(pair.submit(PROMPT, 3))
    assert first.prefills == second.prefills == [pair.prefill.incarnation]
    assert first.cached_tokens == 0
    assert second.cached_tokens
    assert second.finished is not None
    assert second.finished.usage is not None
    assert second.finished.usage.cached_tokens == second.cached_tokens
    metrics = pair.decode.view.render().decode()
    for result, count in (("hit", 40), ("missed", 40)):
        assert any(
            line.startswith("pdrt_prefix_cache_tokens_total{")
            and f'result="{result}"' in line
            and float(line.split()[-1]) == count
            for line in metrics.splitlines()
        ), metrics
    assert msgspec.json.decode(pair.decode.view.status())["prefix_cache"]["pages"] == 10


async def test_several_read_one_prefix_while_others_press() -> None:
    """Sequences that read it go on; those that need its pages wait or take others."""
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        await right(pair.submit(PROMPT, 2))
        readers = [pair.submit([*PROMPT, salt], 30) for salt in range(1, 4)]
        others = [pair.submit(prompt_of(18, salt), 20) for salt in range(5, 9)]
        for stream in readers + others:
            await right(stream)
        assert pair.decode.kv.cache.counts["evicted"]


async def test_a_preempted_sequence_goes_on_from_its_own_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deployed(decode_pages=24, prefill_pages=40) as pair:
        grants = Grants(pair, monkeypatch)
        prompts = [prompt_of(20, salt) for salt in range(1, 4)]
        streams = await pair.submit_together(prompts, 60)
        for stream in streams:
            await right(stream)
        resumed = [grant for grant in grants.seen if grant.output_tokens]
        assert resumed
        assert any(grant.first_page for grant in resumed)


async def test_a_failed_step_keeps_nothing(pair: Pair) -> None:
    pair.decode_executor.gate.clear()
    stream = pair.submit(prompt_of(11), 30)
    await until(lambda: pair.decode_executor.is_running, "a step")
    for _ in range(6):
        pair.decode_executor.gate.step()
    await stream.reach(7)
    await until(lambda: pair.decode_executor.is_running, "the step after")
    cached = len(pair.decode.kv.cache)
    pair.decode_executor.failures = 1
    pair.decode_executor.gate.step()
    assert (await stream.end()).reason is FinishReason.FAILED
    assert len(pair.decode.kv.cache) == cached == 2
    pair.decode_executor.gate.set()
    await right(pair.submit(prompt_of(11), 30))


# A client that leaves, with a prefix in hand. `pair` checks that both pools are whole.


@pytest.fixture
async def begun(pair: Pair) -> Pair:
    await right(pair.submit(PROMPT, 2))
    return pair


LONGER = [*PROMPT, *prompt_of(9, 3)]


async def leave(pair: Pair, stream: Stream) -> None:
    pair.cancel(stream)
    assert (await stream.end()).reason is FinishReason.CANCELLED


async def test_it_leaves_while_prefilling(begun: Pair) -> None:
    begun.prefill_executor.gate.clear()
    stream = begun.submit(LONGER, 8)
    await until(lambda: begun.prefill_executor.is_running, "prefill")
    await leave(begun, stream)
    # Not before the writer has drained.
    assert in_use(begun.decode.pages, OwnerKind.LEASE) == 13
    begun.prefill_executor.gate.set()
    await begun.deployment.quiet()
    await right(begun.submit(LONGER, 8))


async def test_it_leaves_during_the_transfer(begun: Pair, copies: CopyGate) -> None:
    copies.close()
    stream = begun.submit(LONGER, 8)
    await stream.reach(1)
    cached = len(begun.decode.kv.cache)
    await leave(begun, stream)
    assert in_use(begun.decode.pages, OwnerKind.LEASE) == 13
    copies.open()
    await begun.deployment.quiet()
    assert len(begun.decode.kv.cache) == cached, "nothing that was not proved is kept"
    await right(begun.submit(LONGER, 8))


async def test_it_leaves_while_running(begun: Pair) -> None:
    begun.decode_executor.gate.clear()
    stream = begun.submit(LONGER, 8)
    await until(lambda: begun.decode_executor.is_running, "a step")
    begun.cancel(stream)
    await begun.gateway.inspect(begun.decode.incarnation)
    assert in_use(begun.decode.pages, OwnerKind.SEQUENCE) == 13
    begun.decode_executor.gate.set()
    assert (await stream.end()).reason is FinishReason.CANCELLED
    await right(begun.submit(LONGER, 8))


async def test_it_leaves_while_paused() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=2)
    async with deployed(scheduler=scheduler) as pair:
        await right(pair.submit(PROMPT, 2))
        stream = pair.submit(LONGER, 8)
        await stream.reach(2)
        await leave(pair, stream)


async def test_it_leaves_while_it_waits_to_come_back() -> None:
    scheduler = msgspec.structs.replace(SCHEDULER, stream_tokens_max=40)
    async with deployed(decode_pages=24, prefill_pages=40, scheduler=scheduler) as pair:
        old = pair.submit(PROMPT, 50)
        young = pair.submit(prompt_of(20, 1), 70)
        state = pair.decode.scheduler.requests

        def waits(name: RequestId) -> bool:
            request = state.get(name)
            return request is not None and request.state.value == "queued"

        await until(lambda: young.tokens and waits(young.request), "its preemption")
        await leave(pair, young)
        pair.gateway.credit(pair.decode.incarnation, old, 50)
        await right(old)


async def test_a_failed_copy_of_what_was_missing(begun: Pair, copies: CopyGate) -> None:
    copies.failures = 1
    await right(begun.submit(LONGER, 8))
