"""Prompts and outputs of every length around the ends of pages, chunks and the context, with every
page compared as it lands; and what completes at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdrt.protocol.effects import DecodeEffect
from pdrt.protocol.gateway_messages import FinishReason, Usage
from pdrt.protocol.messages import Drained, Outcome
from pdrt.sampling import Sampling
from tests.decode.deployment import SCHEDULER, Pair, Stream, deployed, prompt_of, until
from tests.decode.test_prefixes import Grants
from tests.prefill.executor import LAYOUT, output_of

CHUNK = 16
LIMIT = 96
PAGE = LAYOUT.page_size
LENGTHS = sorted(
    {*range(1, 2 * PAGE + 2)}
    | {end + off for end in (CHUNK, 2 * CHUNK, 3 * CHUNK) for off in (-1, 0, 1)}
    | {LIMIT - 2, LIMIT - 1}
)
MAX_TOKENS = (0, 1, 2, PAGE + 1)


async def right(stream: Stream) -> None:
    """All that was asked for, or all that the context holds."""
    prompt, wanted = stream.submit.token_ids, stream.submit.sampling.max_tokens
    count = min(wanted, LIMIT - len(prompt))
    finished = await stream.end()
    assert (finished.reason, finished.usage is not None) == (FinishReason.LENGTH, True), finished
    assert stream.tokens == output_of(prompt, count), (len(prompt), wanted)
    assert finished.usage == Usage(len(prompt), count, finished.usage.cached_tokens)
    assert stream.finishes == 1


@pytest.mark.parametrize(("caching", "chunk"), [(True, 5), (False, CHUNK)])
async def test_every_length(caching: bool, chunk: int) -> None:
    """One at a time, and then all at once: with caches each finds what the others left."""
    scheduler = msgspec.structs.replace(
        SCHEDULER,
        enable_prefix_caching=caching,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, SCHEDULER.max_num_seqs),
    )
    async with deployed(scheduler=scheduler, kv_checksum=True) as pair:
        assert pair.decode.executor.identity.max_model_len == LIMIT
        for length in LENGTHS[: 2 * PAGE + 1]:
            for max_tokens in MAX_TOKENS:
                await right(pair.submit(prompt_of(length), max_tokens))
        await pair.deployment.quiet()
        streams = [
            pair.submit(prompt_of(length, salt=1), max_tokens)
            for length in LENGTHS
            for max_tokens in MAX_TOKENS
        ]
        for stream in streams:
            await right(stream)


async def test_preempted_before_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs one token more and so no KV here: its next room is granted no pages, and the token
    is the right one, whatever the sequence had given up."""
    scheduler = msgspec.structs.replace(SCHEDULER, enable_prefix_caching=False)
    seen = 0
    async with deployed(decode_pages=12, scheduler=scheduler) as pair:
        grants = Grants(pair, monkeypatch)
        # Who lands first has one token more than the other: one of these is preempted just then.
        for max_tokens in range(12, 20):
            grants.seen.clear()
            pair.decode_executor.gate.clear()
            old = pair.submit(prompt_of(8), 24)
            young = pair.submit(prompt_of(8, max_tokens), max_tokens)
            await until(lambda: pair.decode.scheduler.running == 2, "the landing of both")
            pair.decode_executor.gate.set()
            await right(young)
            await right(old)
            for grant in grants.seen:
                rest = grant.sampling.max_tokens - grant.output_tokens
                if grant.output_tokens and rest == 1:
                    assert grant.pages == ()
                    seen += 1
    assert seen, "no sequence was preempted before its last token"


class HeldDrains:
    """`Drained` messages wait until there are `count`, and are then heard in one turn of the loop
    as `order` says."""

    def __init__(self, pair: Pair, count: int, order: Callable[[list[Any]], list[Any]]) -> None:
        self._count = count
        self._order = order
        self._held: list[tuple[str, Drained]] = []
        self._receive = pair.decode.table.receive
        pair.decode.table.receive = self._hold  # type: ignore[method-assign]

    def _hold(self, endpoint: str, message: Any, now: float) -> list[DecodeEffect]:
        if not isinstance(message, Drained):
            return self._receive(endpoint, message, now)
        assert message.outcome is Outcome.COMPLETE
        self._held.append((endpoint, message))
        if len(self._held) < self._count:
            return []
        effects: list[DecodeEffect] = []
        for where, drained in self._order(self._held):
            effects += self._receive(where, drained, now)
        self._held.clear()
        return effects


ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "in order": lambda held: held,
    "reversed": lambda held: held[::-1],
    "each twice": lambda held: [message for message in held for _ in range(2)],
    "all twice": lambda held: [*held, *held[::-1]],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("kv_checksum", [False, True], ids=["plain", "compared"])
async def test_rooms_that_complete_in_one_step(
    kv_checksum: bool, order: Callable[[list[Any]], list[Any]]
) -> None:
    """In any order, and more than once."""
    async with deployed(kv_checksum=kv_checksum) as pair:
        HeldDrains(pair, 3, order)
        streams = [pair.submit(prompt_of(4, salt), 6) for salt in range(3)]
        for stream in streams:
            await right(stream)


async def test_sequences_that_end_in_one_step(pair: Pair) -> None:
    """All that run end with the same forward: by length, by a stop token, by a cancel."""
    stopped_at = output_of(prompt_of(8, 2), 5)[4]
    pair.decode_executor.gate.clear()
    streams = [pair.submit(prompt_of(8, salt), 5) for salt in range(2)]
    streams.append(pair.submit(prompt_of(8, 2), 50, stop_token_ids=(stopped_at,)))
    cancelled = pair.submit(prompt_of(8, 3), 50)
    await until(lambda: pair.decode.scheduler.running == 4, "four sequences")
    for done in range(1, 4):
        pair.decode_executor.gate.step()
        await until(lambda n=done: len(pair.decode_executor.steps) > n, "a step")
    pair.cancel(cancelled)
    await pair.gateway.inspect(pair.decode.incarnation)
    pair.decode_executor.gate.set()
    for salt, stream in enumerate(streams):
        await stream.end()
        assert stream.tokens[:5] == output_of(prompt_of(8, salt), 5)
        assert stream.finishes == 1
    assert (await cancelled.end()).reason is FinishReason.CANCELLED


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 10 * LIMIT])
async def test_a_prompt_that_is_too_long_opens_no_room(pair: Pair, length: int) -> None:
    """Should a gateway let it through: it is refused, nobody computes or says anything for it, and
    whoever is served at the same time is not disturbed."""
    pair.prefill_executor.gate.clear()
    other = pair.submit(prompt_of(10), 6)
    await until(lambda: pair.prefill_executor.is_running, "prefill")
    before = pair.decode.table.next_room()
    refused = pair.gateway.submit(
        pair.decode.incarnation, prompt_of(length, 1), Sampling(max_tokens=4, temperature=0.0)
    )
    finished = await refused.end()
    assert (finished.reason, refused.tokens) == (FinishReason.REJECTED, [])
    assert pair.decode.table.next_room() == before
    pair.prefill_executor.gate.set()
    await right(other)
