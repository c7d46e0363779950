"""Requests that share prefixes come, leave and fail at random over both workers: whatever is told
is right, each ends once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Grammar, GrammarKind, Sampling
from tests.decode.deployment import SCHEDULER, Pair, Stream, deployed, prompt_of, until
from tests.prefill.executor import output_of
from tests.transfer.copies import CopyGate

REQUESTS = 40
COMPLETE = {FinishReason.LENGTH, FinishReason.STOP}
FAILED = {FinishReason.FAILED, FinishReason.CANCELLED}


class Chaos:
    """What happens to one pair; everything is drawn from `draw`."""

    def __init__(self, pair: Pair, copies: CopyGate, draw: random.Random) -> None:
        self.pair = pair
        self.copies = copies
        self.draw = draw
        self.streams: list[Stream] = []
        self.cancelled: set[Stream] = set()

    def submit(self) -> None:
        draw = self.draw
        prompt = self._prompt()
        earlier = output_of(prompt, draw.choice([0, 0, 0, 3]))
        has_grammar = draw.random() < 0.25
        wanted = Sampling(
            max_tokens=draw.choice([0, 1, 2, 9, 40, 40, 40]),
            temperature=0.0,
            stop_token_ids=tuple(output_of(prompt, 20)[-1:]) if draw.random() < 0.3 else (),
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            logprobs=draw.choice([None, None, 1]),
            prompt_logprobs=draw.choice([None, None, None, 0]),
            grammar=Grammar(GrammarKind.REGEX, draw.choice("abc")) if has_grammar else None,
        )
        if wanted.max_tokens < len(earlier):
            earlier = []
        self.streams.append(
            self.pair.gateway.submit(
                self.pair.decode.incarnation,
                prompt,
                wanted,
                earlier=earlier,
                cache_salt=draw.choice(["", "", "salt"]),
            )
        )

    def _prompt(self) -> list[int]:
        """What begins as another one, or goes on from what has been said."""
        draw = self.draw
        stream = draw.choice(self.streams) if self.streams and draw.random() < 0.4 else None
        if stream is not None and len(stream.submit.token_ids) < 40:
            before = [*stream.submit.token_ids, *stream.submit.output_token_ids, *stream.tokens]
            return before[:60] + prompt_of(draw.randint(0, 3), draw.randint(2, 9))
        common = prompt_of(draw.randint(1, 30), draw.randint(0, 1))
        return common + prompt_of(draw.randint(0, 9), draw.randint(2, 9))

    def disturb(self) -> None:
        """One thing goes wrong, or hangs until `mend`."""
        pair, draw = self.pair, self.draw
        executor = draw.choice([pair.prefill_executor, pair.decode_executor])
        match draw.randint(0, 6):
            case 0:
                executor.failures = 1
            case 1:
                self.copies.failures = 1
            case 2:
                self.copies.close()
            case 3:
                executor.gate.clear()
            case 4:
                executor.grammars.gate.clear()
            case 5:
                self._cancel()
            case 6:
                executor.gate.step()

    def _cancel(self) -> None:
        alive = [stream for stream in self.streams if stream.finished is None]
        if alive:
            stream = self.draw.choice(alive)
            self.cancelled.add(stream)
            self.pair.cancel(stream)

    def read(self) -> None:
        """Clients take what there is, some of them late."""
        for stream in self.streams:
            if stream.finished is None and self.draw.random() < 0.7:
                taken = stream.earlier + len(stream.tokens)
                self.pair.gateway.credit(self.pair.decode.incarnation, stream, taken)

    def mend(self) -> None:
        self.copies.open()
        for executor in (self.pair.prefill_executor, self.pair.decode_executor):
            executor.gate.set()
            executor.grammars.gate.set()

    async def turn(self) -> None:
        for _ in range(self.draw.randint(0, 3)):
            self.submit()
        self.disturb()
        self.read()
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.005]))
        if self.draw.random() < 0.4:
            self.mend()
        report = await self.pair.gateway.inspect(self.pair.decode.incarnation)
        assert not report.broken
        report = await self.pair.gateway.inspect(self.pair.prefill.incarnation)
        assert not report.broken

    async def finish(self) -> None:
        """Nothing goes wrong any more: everybody ends."""
        self.copies.failures = 0
        for executor in (self.pair.prefill_executor, self.pair.decode_executor):
            executor.failures = 0
        self.mend()
        await until(self._is_over, "the end of every request")

    def _is_over(self) -> bool:
        self.read()
        return all(stream.finished for stream in self.streams)

    def check(self, stream: Stream) -> None:
        sampling, prompt = stream.submit.sampling, stream.submit.token_ids
        tokens = [*stream.submit.output_token_ids, *stream.tokens]
        finished = stream.finished
        assert finished is not None
        assert tokens == output_of(prompt, len(tokens))
        assert len(tokens) <= sampling.max_tokens
        assert finished.reason in COMPLETE | FAILED, finished
        assert finished.reason is not FinishReason.CANCELLED or stream in self.cancelled
        if finished.reason is FinishReason.LENGTH:
            assert len(tokens) == min(sampling.max_tokens, self.limit - len(prompt))
        if finished.reason is FinishReason.STOP:
            assert tokens[-1] in sampling.stop_token_ids
        if finished.reason in COMPLETE:
            assert (stream.scores is None) == (sampling.prompt_logprobs is None)
            assert finished.usage is not None
            assert finished.usage.output_tokens == len(tokens)
            assert 0 <= finished.usage.cached_tokens < len(prompt) + stream.earlier

    @property
    def limit(self) -> int:
        return self.pair.decode_executor.identity.max_model_len


@pytest.mark.parametrize("seed", range(6))
async def test_chaos(copies: CopyGate, seed: int) -> None:
    draw = random.Random(seed)
    scheduler = msgspec.structs.replace(
        SCHEDULER,
        max_num_seqs=draw.choice([1, 2, 8]),
        stream_tokens_max=draw.choice([2, 8, 100]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
    )
    pages = draw.choice([24, 30, 64])
    async with deployed(decode_pages=pages, prefill_pages=pages, scheduler=scheduler) as pair:
        chaos = Chaos(pair, copies, draw)
        while len(chaos.streams) < REQUESTS:
            await chaos.turn()
        await chaos.finish()
        for stream in chaos.streams:
            chaos.check(stream)
