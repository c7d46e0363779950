"""Which chunks of which prompts the next prefill step computes. Pure.

First come, first served: a room gets source pages for its whole prompt before it starts, and the
token budget of a step goes to the oldest rooms first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from pdrt.errors import PoolExhausted
from pdrt.ids import RoomId
from pdrt.kv.layout import KvLayout
from pdrt.protocol.messages import Grant

TakePages = Callable[[RoomId, int], list[int]]
"""Take that many free pages for the room, or raise PoolExhausted."""


class PrefillJob:
    """One room's prompt on its way through the model."""

    def __init__(self, grant: Grant, queued_at: float) -> None:
        self.room = grant.room
        self.grant = grant
        self.queued_at = queued_at
        self.started_at: float | None = None
        """When the first chunk was planned."""
        self.pages: list[int] = []
        """Source pages of the whole prompt; empty until it starts."""
        self.computed = 0
        """Tokens whose KV is in the pool."""
        self.computed_at: float | None = None
        """When the last chunk was done."""

    @property
    def remaining(self) -> int:
        return len(self.grant.token_ids) - self.computed


class Chunk(msgspec.Struct, frozen=True):
    """Part of a step: tokens `[start, end)` of one room's prompt."""

    room: RoomId
    start: int
    end: int
    is_last: bool


class PrefillScheduler:
    """Rooms waiting for, and in, computation. One step is planned, run and finished at a time."""

    def __init__(self, layout: KvLayout, tokens_per_step_max: int, rows_per_step_max: int) -> None:
        self.jobs: dict[RoomId, PrefillJob] = {}
        self._layout = layout
        self._tokens_max = tokens_per_step_max
        self._rows_max = rows_per_step_max
        # Rooms without source pages yet, oldest first.
        self._waiting: deque[RoomId] = deque()
        # Rooms with pages that are not wholly computed, oldest first.
        self._started: dict[RoomId, PrefillJob] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._started)

    @property
    def queued(self) -> int:
        """Rooms that wait for source pages."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rooms that are being computed."""
        return len(self._started)

    def add(self, grant: Grant, now: float) -> None:
        """Queue an opened room."""
        assert grant.room not in self.jobs, grant.room
        self.jobs[grant.room] = PrefillJob(grant, now)
        self._waiting.append(grant.room)

    def stop(self, room: RoomId) -> None:
        """Compute no more of it from the next step on. Its pages stay its own. Idempotent."""
        self._started.pop(room, None)
        if room in self._waiting:
            self._waiting.remove(room)

    def forget(self, room: RoomId) -> list[int]:
        """The room is over; returns the source pages that it had, now to be freed."""
        self.stop(room)
        return self.jobs.pop(room).pages

    def plan(self, take: TakePages, now: float) -> list[Chunk]:
        """The next step's chunks; empty when nothing can run (no work, or no free pages)."""
        self._start_waiting(take)
        chunks: list[Chunk] = []
        budget = self._tokens_max
        for job in self._started.values():
            if not budget or len(chunks) == self._rows_max:
                break
            count = min(budget, job.remaining)
            job.started_at = now if job.started_at is None else job.started_at
            end = job.computed + count
            is_last = end == len(job.grant.token_ids)
            chunks.append(Chunk(job.room, job.computed, end, is_last))
            budget -= count
        return chunks

    def _start_waiting(self, take: TakePages) -> None:
        """Give pages to the oldest waiting rooms. Nobody overtakes: a long prompt is not starved
        by short ones."""
        while self._waiting and len(self._started) < self._rows_max:
            job = self.jobs[self._waiting[0]]
            try:
                job.pages = take(job.room, self._layout.pages_for(len(job.grant.token_ids)))
            except PoolExhausted:
                return
            self._waiting.popleft()
            self._started[job.room] = job

    def finish(self, chunk: Chunk, now: float) -> int:
        """A chunk has been computed; returns how many of the prompt's pages are complete now."""
        job = self.jobs[chunk.room]
        assert job.computed == chunk.start, (chunk, job.computed)
        job.computed = chunk.end
        if chunk.is_last:
            job.computed_at = now
            self._started.pop(chunk.room, None)
            return self._layout.pages_for(chunk.end)
        return chunk.end // self._layout.page_size

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert set(self._waiting).isdisjoint(self._started)
        assert self._started.keys() <= self.jobs.keys()
        for job in self.jobs.values():
            assert 0 <= job.computed <= len(job.grant.token_ids), job.room
            wanted = self._layout.pages_for(len(job.grant.token_ids))
            assert len(job.pages) in (0, wanted), (job.room, len(job.pages))
