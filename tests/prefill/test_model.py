"""A cached prefix gives what computing it gives: scheduler, cache and rows over a real model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.kv.pages import PageTable
from pdrt.kv.prefix import PrefixCache
from pdrt.model.executor import Executor
from pdrt.prefill.prompts import Prompts
from pdrt.sampling import Sampling, TokenLogprobs
from pdrt.scheduling.prefill import PrefillScheduler
from tests.model.tiny import make_tiny_model
from tests.scheduling.grants import grant

OUTPUT = 6
STEP_TOKENS = 24
"""Chunks end within pages."""


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    model = ModelConfig(model=str(directory), dtype="float32", kv_cache_memory_bytes=8 * 2**20)
    executor = Executor.load(model, DeviceConfig(device="cpu", threads=1), lambda text: None)
    yield executor
    executor.close()


class Rooms:
    """Prompts, each a room, computed as a prefill worker would."""

    def __init__(self, executor: Executor, *, is_caching: bool) -> None:
        self._executor = executor
        self.cache = PrefixCache(PageTable(executor.pages), is_caching)
        self._scheduler = PrefillScheduler(executor.layout, self.cache, STEP_TOKENS, 4)
        self._prompts = Prompts()
        self._serial = 0
        self.scores: dict[int, tuple[TokenLogprobs, ...]] = {}

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sampling, output: int) -> list[int]:
        """The next token of each; `output` of its tokens are output."""
        first = self._serial + 1
        for prompt in prompts:
            self._serial += 1
            made = grant(self._serial, len(prompt))
            made = msgspec.structs.replace(
                made, token_ids=tuple(prompt), sampling=sampling, output_tokens=output
            )
            self._scheduler.add(made, 0.0)
        tokens: dict[int, int] = {}
        while chunks := self._scheduler.plan(0.0):
            rows = [self._prompts.row(self._scheduler.jobs[c.room], c) for c in chunks]
            result = self._executor.step_blocking(rows)
            for index, chunk in enumerate(chunks):
                self._scheduler.finish(chunk, 0.0)
                self._prompts.add_scores(chunk.room, result.scores[index])
                if (token := result.tokens[index]) is not None:
                    tokens[chunk.room.serial] = token
        for job in list(self._scheduler.jobs.values()):
            self.scores[job.room.serial] = self._prompts.scores(job.room)
            self.cache.release(self._scheduler.forget(job.room), job.owner)
        self.cache.check()
        return [tokens[serial] for serial in range(first, self._serial + 1)]


def make_prompts(vocabulary: int, page_size: int) -> list[list[int]]:
    """With prefixes in common that end on and beside the edges of pages."""
    draw = random.Random(5)
    common = [draw.randrange(3, vocabulary) for _ in range(4 * page_size)]
    cuts = (0, page_size, 2 * page_size + 3, 4 * page_size, 4 * page_size)
    return [common[:cut] + [draw.randrange(3, vocabulary) for _ in range(5)] for cut in cuts] + [
        common,
        common,
    ]


def generate(rooms: Rooms, prompts: list[list[int]]) -> list[list[int]]:
    """Token by token, each in a new room: its prefix was computed by the rooms before."""
    greedy = Sampling(max_tokens=OUTPUT, temperature=0.0)
    sequences = [list(prompt) for prompt in prompts]
    for output in range(OUTPUT):
        for sequence, token in zip(sequences, rooms.run(sequences, greedy, output), strict=True):
            sequence.append(token)
    return [sequence[-OUTPUT:] for sequence in sequences]


def test_cached_prefixes_give_the_same_greedy_tokens(executor: Executor) -> None:
    prompts = make_prompts(executor.identity.vocab_size, executor.layout.page_size)
    cached, computed = (Rooms(executor, is_caching=is_caching) for is_caching in (True, False))
    assert generate(cached, prompts) == generate(computed, prompts)
    assert cached.cache.tokens["hit"] > 2 * cached.cache.tokens["missed"]
    assert not computed.cache.tokens


def test_prompts_are_scored_the_same_whatever_is_cached(executor: Executor) -> None:
    prompts = make_prompts(executor.identity.vocab_size, executor.layout.page_size)
    rooms = Rooms(executor, is_caching=True)
    generate(rooms, prompts)
    scoring = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    rooms.run(prompts, scoring, 0)
    together = list(rooms.scores.values())[-len(prompts) :]
    for prompt, scores in zip(prompts, together, strict=True):
        alone = Rooms(executor, is_caching=False)
        alone.run([prompt], scoring, 0)
        (wanted,) = alone.scores.values()
        assert len(scores) == len(prompt) - 1
        assert [score.rank for score in scores] == [score.rank for score in wanted]
        for score, other in zip(scores, wanted, strict=True):
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in score.top] == [token for token, _ in other.top]
