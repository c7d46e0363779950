"""The executor: one model, one pool, one compute thread. Both kinds of worker drive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from itertools import islice

import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model.adjust import advance_matchers, sampling_of
from pdrt.model.attention import ForwardContext
from pdrt.model.batch import Row, StepResult, validate_rows
from pdrt.model.collectives import RankPlace
from pdrt.model.completion import completion
from pdrt.model.grammar import Grammars
from pdrt.model.logprobs import score
from pdrt.model.prepare import Prepared, prepare, warm_up_rows
from pdrt.model.rank_step import encode_step
from pdrt.model.sampling import sample
from pdrt.sampling import TokenLogprobs

TellRanks = Callable[[bytes], None]
"""Hands a step to every other rank of the worker, after those before it, and returns at once; they
take part in it by `RankExecutor.step`. Called where the leader's own `step` is called."""


class Executor:
    """Runs forwards over the pool, one step at a time. With other ranks it is the leader's: it has
    them run the same forward, and alone samples and scores.

    Attributes:
        identity: the model; its name and `max_model_len` as configured.
        layout: geometry of the whole model's pages; the pool's own has this rank's heads.
        pool: the KV memory; which page belongs to whom is the caller's business.
        pages: pages in the pool, as many as on every rank.
        device: where it computes.
        description: what computes there, in words.
        grammars: what outputs must look like, compiled in processes of its own.
        tell_ranks: set by whoever reaches the other ranks, where there are any.
    """

    def __init__(self, prepared: Prepared) -> None:
        identity, loaded = prepared.identity, prepared.loaded
        self.identity = identity
        self.grammars = Grammars(prepared.directory, identity.vocab_size, identity.eos_token_ids)
        self.layout = loaded.layout
        self.pool = prepared.pool
        self.pages = prepared.pool.pages
        self.device: torch.device = self.pool.tensor.device
        self.description = loaded.model.description
        self._model = loaded.model
        self._backend = loaded.backend
        self._collectives = loaded.collectives
        self.tell_ranks: TellRanks | None = None
        self._wait = completion(self.device)
        self._thread = prepared.thread
        self._current: Future[StepResult] | None = None
        """The latest step. At most one is ever queued or running."""
        self._submitted_at = 0.0

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        device: DeviceConfig,
        progress: Callable[[str], None],
        place: RankPlace | None = None,
    ) -> Executor:
        """Fetch and load the model, allocate the pool, and run a step to warm up. Blocks; with
        other ranks, until they have done the same (`RankExecutor.load`).

        Args:
            device: of this rank alone, as `pdrt.model.resources.share_device` gives it.
            place: rank 0's, where the model is shared with other ranks.

        Raises:
            ConfigError: the device, its cores or the pool's memory cannot be had.
            ModelError: the model cannot be found, loaded, split or served.
            RanksLost: another rank failed to load.
        """
        assert place is None or place.rank == 0, "the leader is rank 0"
        executor = cls(prepare(model, device, progress, place))
        limit = executor.identity.max_model_len
        try:
            # Each rank does this by itself: there may be nobody yet who passes steps on.
            rows = warm_up_rows(executor.layout.page_size, executor.pages, limit)
            executor._thread.submit(executor._step, rows).result()
        except BaseException:
            executor.close()
            raise
        return executor

    def step(self, rows: Sequence[Row]) -> asyncio.Future[StepResult]:
        """Run one forward on the compute thread, which begins at once, not when the result is
        awaited; the event loop goes on meanwhile.

        Cancelling the caller does not stop a step that runs: its pages stay in use until it is
        over, and the next step may not begin before.

        Raises:
            RanksLost: other ranks no longer compute with this one, or did not before. The worker
                must end.
            Exception: whatever the forward raised (out of memory, say). The rows' new KV is
                undefined. Without other ranks the executor stays usable.
        """
        return asyncio.wrap_future(self._submit(rows))

    def step_blocking(self, rows: Sequence[Row]) -> StepResult:
        """`step` for callers without an event loop: waits for the compute thread."""
        return self._submit(rows).result()

    def close(self) -> None:
        """Wait for a running step, end the threads, leave the other ranks, give the pool back."""
        self.grammars.close()
        self._thread.shutdown()
        if self._collectives is not None:
            self._collectives.close()
        self.pool.close()

    def _submit(self, rows: Sequence[Row]) -> Future[StepResult]:
        assert self._current is None or self._current.done(), "one step at a time"
        validate_rows(rows, self.layout, self.pages, self.identity.max_model_len)
        if self._collectives is not None:
            assert self.tell_ranks is not None, "nobody reaches the other ranks"
            self.tell_ranks(encode_step(rows, self.layout.page_size))
        self._current = self._thread.submit(self._step, rows)
        self._submitted_at = time.monotonic()
        return self._current

    def step_age(self, now: float) -> float:
        """Seconds since the step that is under way was submitted; 0 when none is."""
        is_idle = self._current is None or self._current.done()
        return 0.0 if is_idle else now - self._submitted_at

    def _step(self, rows: Sequence[Row]) -> StepResult:
        started = time.perf_counter()
        try:
            with torch.inference_mode():
                context = ForwardContext(self.pool, rows, self._backend)
                advance_matchers(rows)
                logits = self.forward(context)
                count = len(context.sampled)
                tokens, logprobs = self._sample(context, rows, logits[:count])
                scores = _score_prompts(context, rows, logits[count:])
        finally:
            # Nobody sends or takes the pages of a step that a GPU still writes to, also where it
            # drew no token, or failed.
            self._wait()
        return StepResult(tokens, time.perf_counter() - started, logprobs, scores)

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Logits (`logits_to_keep`, vocabulary) of a step, valid until the next one. On the compute
        thread."""
        with nullcontext() if self._collectives is None else self._collectives.unbroken():
            return self._model.logits(context)

    def _sample(
        self, context: ForwardContext, rows: Sequence[Row], logits: torch.Tensor
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        tokens: list[int | None] = [None] * len(rows)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if not context.sampled:
            return tokens, logprobs
        sampled = [rows[index] for index in context.sampled]
        drawn = sample(logits, sampled, self.identity.eos_token_ids)
        for index, token in zip(context.sampled, drawn, strict=True):
            tokens[index] = token
        tops = [sampling_of(row).logprobs for row in sampled]
        asked = [(place, top) for place, top in enumerate(tops) if top is not None]
        if asked:
            places = [place for place, _ in asked]
            told = score(logits[places], [drawn[p] for p in places], [top for _, top in asked])
            for place, each in zip(places, told, strict=True):
                logprobs[context.sampled[place]] = each
        return tokens, logprobs


def _score_prompts(
    context: ForwardContext, rows: Sequence[Row], logits: torch.Tensor
) -> list[tuple[TokenLogprobs, ...]]:
    """Per row, of its scored tokens, whose logits come row by row."""
    scores: list[tuple[TokenLogprobs, ...]] = [()] * len(rows)
    if not context.scored:
        return scores
    scored = [rows[index] for index in context.scored]
    tokens = [token for row in scored for token in row.scored]
    tops = [row.scored_top for row in scored for _ in row.scored]
    told = iter(score(logits, tokens, tops))
    for index, row in zip(context.scored, scored, strict=True):
        scores[index] = tuple(islice(told, len(row.scored)))
    return scores
