"""The executor of a rank that is not the leader: the same forwards, and no sampling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from pdrt.config import DeviceConfig, ModelConfig
from pdrt.model.attention import ForwardContext
from pdrt.model.batch import Row
from pdrt.model.collectives import RankPlace
from pdrt.model.completion import completion
from pdrt.model.prepare import Prepared, prepare, warm_up_rows
from pdrt.model.rank_step import decode_step


class RankExecutor:
    """Takes part in the leader's steps, one after the other, on its compute thread.

    Attributes:
        layout: geometry of the whole model's pages; the pool's own has this rank's heads.
        pool: the KV memory of this rank.
        pages: pages in the pool, as many as on every rank.
        description: what computes, in words.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.pool = prepared.pool
        self.layout = prepared.loaded.layout
        self.pages = prepared.pool.pages
        self.description = prepared.loaded.model.description
        self._model, self._backend = prepared.loaded.model, prepared.loaded.backend
        assert prepared.loaded.collectives is not None, "a rank among others"
        self._collectives = prepared.loaded.collectives
        self._wait = completion(prepared.pool.tensor.device)
        self._thread = prepared.thread
        self._max_model_len = prepared.identity.max_model_len
        self._latest: Future[None] | None = None
        self._submitted_at = 0.0

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        device: DeviceConfig,
        progress: Callable[[str], None],
        place: RankPlace,
    ) -> RankExecutor:
        """`Executor.load` of the rank at `place`, which all ranks of the worker do at once.

        Raises:
            ConfigError, ModelError, RanksLost: as `pdrt.model.prepare.prepare`.
        """
        executor = cls(prepare(model, device, progress, place))
        try:
            rows = warm_up_rows(executor.layout.page_size, executor.pages, executor._max_model_len)
            executor._thread.submit(executor._step, rows).result()
        except BaseException:
            executor.close()
            raise
        return executor

    def step(self, body: bytes) -> asyncio.Future[None]:
        """Take part in the step that the leader's executor has described, after those before it.

        The leader may be one step ahead: it submits the next one when its own part is done.

        Raises:
            Exception: whatever the forward raised, `RanksLost` if another rank is to blame. The
                ranks are out of step then, and the worker must end.
        """
        return asyncio.wrap_future(self._submit(body))

    def step_blocking(self, body: bytes) -> None:
        """`step` for callers without an event loop: waits for the compute thread."""
        self._submit(body).result()

    def step_age(self, now: float) -> float:
        """Seconds since the latest step that is under way was submitted; 0 when none is."""
        is_idle = self._latest is None or self._latest.done()
        return 0.0 if is_idle else now - self._submitted_at

    def close(self) -> None:
        """Wait for a running step, end the thread, leave the other ranks, give the pool back."""
        self._thread.shutdown()
        self._collectives.close()
        self.pool.close()

    def _submit(self, body: bytes) -> Future[None]:
        self._latest = self._thread.submit(self._step, decode_step(body))
        self._submitted_at = time.monotonic()
        return self._latest

    def _step(self, rows: Sequence[Row]) -> None:
        with torch.inference_mode(), self._collectives.unbroken():
            try:
                self._model.logits(ForwardContext(self.pool, rows, self._backend))
            finally:
                self._wait()
