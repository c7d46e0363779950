"""The executor: one model, one pool, one compute thread. Both kinds of worker drive it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.kv.pool import KvPool
from pdrt.model.adjust import advance_matchers, sampling_of
from pdrt.model.attention import ForwardContext
from pdrt.model.batch import Row, StepResult, validate_rows
from pdrt.model.cgroup import available_memory_bytes, cpu_quota
from pdrt.model.fetch import resolve_model
from pdrt.model.grammar import Grammars
from pdrt.model.identity import ModelIdentity, read_identity
from pdrt.model.loader import LoadedModel, load_model
from pdrt.model.logprobs import score
from pdrt.model.placement import cuda_pool_bytes, limit_identity, pool_pages, select_device
from pdrt.model.resources import ComputePlan, usable_cpus
from pdrt.model.sampling import sample
from pdrt.sampling import Sampling, TokenLogprobs


class Executor:
    """Runs forwards over the pool, one step at a time.

    Attributes:
        identity: the model; its name and `max_model_len` as configured.
        layout: geometry of the pool's pages.
        pool: the KV memory; which page belongs to whom is the caller's business.
        pages: pages in the pool.
        device: where it computes.
        description: what computes there, in words.
        grammars: what outputs must look like, compiled in processes of its own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        identity: ModelIdentity,
        thread: ThreadPoolExecutor,
        grammars: Grammars,
    ) -> None:
        self.identity = identity
        self.grammars = grammars
        self.layout = pool.layout
        self.pool = pool
        self.pages = pool.pages
        self.device: torch.device = pool.tensor.device
        self.description = loaded.model.description
        self._model = loaded.model
        self._backend = loaded.backend
        self._thread = thread
        self._current: Future[StepResult] | None = None
        """The latest step. At most one is ever queued or running."""
        self._submitted_at = 0.0

    @classmethod
    def load(
        cls, model: ModelConfig, device: DeviceConfig, progress: Callable[[str], None]
    ) -> Executor:
        """Fetch and load the model, allocate the pool, and run a step to warm up. Blocks.

        Raises:
            ConfigError: the device, its cores or the pool's memory cannot be had.
            ModelError: the model cannot be found, loaded or served.
        """
        target = select_device(device)
        plan = usable_cpus(os.sched_getaffinity(0), cpu_quota(), device)
        directory = resolve_model(model.model, progress, load_format=model.load_format)
        identity = limit_identity(read_identity(directory, model.load_format), model)
        thread = ThreadPoolExecutor(1, "pdrt-compute", _prepare_thread, (plan,))
        try:
            progress(f"loading {identity.name}")
            # On the compute thread, so that its cores' memory holds the weights and the pool.
            loaded, pool = thread.submit(_load, directory, model, identity, target).result()
        except BaseException:
            thread.shutdown()
            raise
        grammars = Grammars(directory, identity.vocab_size, identity.eos_token_ids)
        executor = cls(loaded, pool, identity, thread, grammars)
        try:
            executor.step_blocking(_warm_up_rows(executor))
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
            Exception: whatever the forward raised (out of memory, say). The executor stays
                usable; the rows' new KV is undefined.
        """
        return asyncio.wrap_future(self._submit(rows))

    def step_blocking(self, rows: Sequence[Row]) -> StepResult:
        """`step` for callers without an event loop: waits for the compute thread."""
        return self._submit(rows).result()

    def close(self) -> None:
        """Wait for a running step, end the threads, give the pool's memfd back."""
        self.grammars.close()
        self._thread.shutdown()
        self.pool.close()

    def _submit(self, rows: Sequence[Row]) -> Future[StepResult]:
        assert self._current is None or self._current.done(), "one step at a time"
        validate_rows(rows, self.layout, self.pages, self.identity.max_model_len)
        self._current = self._thread.submit(self._step, rows)
        self._submitted_at = time.monotonic()
        return self._current

    def step_age(self, now: float) -> float:
        """Seconds since the step that is under way was submitted; 0 when none is."""
        is_idle = self._current is None or self._current.done()
        return 0.0 if is_idle else now - self._submitted_at

    def _step(self, rows: Sequence[Row]) -> StepResult:
        started = time.perf_counter()
        with torch.inference_mode():
            context = ForwardContext(self.pool, rows, self._backend)
            advance_matchers(rows)
            logits = self.forward(context)
            count = len(context.sampled)
            tokens, logprobs = self._sample(context, rows, logits[:count])
            scores = _score_prompts(context, rows, logits[count:])
        return StepResult(tokens, time.perf_counter() - started, logprobs, scores)

    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Logits (`logits_to_keep`, vocabulary) of a step, valid until the next one. On the compute
        thread."""
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


def _prepare_thread(plan: ComputePlan) -> None:
    """Pin this thread and size its OpenMP team, whose threads inherit the cores when the first
    operator starts them."""
    os.sched_setaffinity(0, plan.cpus)
    torch.set_num_threads(plan.threads)


def _load(
    directory: Path, model: ModelConfig, identity: ModelIdentity, device: torch.device
) -> tuple[LoadedModel, KvPool]:
    loaded = load_model(directory, model, device, identity.max_model_len)
    if device.type == "cuda":
        available = cuda_pool_bytes(device, model.gpu_memory_utilization)
    else:
        available = available_memory_bytes()
    pages = pool_pages(
        loaded.layout, identity.max_model_len, model.kv_cache_memory_bytes, device.type, available
    )
    return loaded, KvPool(loaded.layout, pages, device)


def _warm_up_rows(executor: Executor) -> list[Row]:
    """A prefill chunk and a decode row: both paths, and whatever the model refuses, at load."""
    size = executor.layout.page_size
    greedy = Sampling(max_tokens=1, temperature=0.0)
    chunk = min(size, executor.identity.max_model_len)
    if executor.pages < 2 or chunk < 2:
        return [Row(token_ids=[0], start=0, pages=[0], sampling=greedy)]
    return [
        Row(token_ids=[0] * chunk, start=0, pages=[0], sampling=greedy),
        Row(token_ids=[0], start=0, pages=[1], sampling=greedy),
    ]
