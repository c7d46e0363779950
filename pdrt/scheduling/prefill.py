"""Which chunks of which prompts the next prefill step computes. Pure.

Mean time to first token is least when prompts are computed one after another, the one with the
fewest tokens left first (Schrage, "A proof of the optimality of the shortest remaining processing
time discipline", 1968), but then long ones could starve. So half of a step's token budget B
(rounded up) goes to the oldest room, the rest to the rooms with the fewest tokens left, of equals
to the older one. A step that completes a prompt ends with it once it is large enough to be
efficient: whatever else it computed would only put off that prompt's first token. Rooms get source
pages for their whole prompt, cached ones first, when they are first chosen. So, while there are
pages:

- nobody is starved: a room ends within sum(⌈tokens left / ⌈B/2⌉⌉) steps, over itself and the rooms
  older than it, whatever else arrives;
- short prompts do not wait for long ones: a room with r tokens left ends within
  ⌈(r + t) / ⌊B/2⌋⌉ + ⌈(n + 1) / (R - 1)⌉ + e steps, where n rooms come to have no more tokens
  left than it, then t in all, R is the limit of rows, and e rooms end before it does.

With a budget or a limit of 1 it is first come, first served.

When pages run out, the oldest room takes the first that suffice: of those behind it at most
`OVERTAKEN_MAX` may start before it does, and then none.

A room whose next pages are computed by another one in the same step sits that step out, where that
gives it as much as its own turn would but for less than a page and its last one. In the next step
it finds them in the cache, or, if that forward failed, computes them itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.errors import PoolExhausted
from pdrt.ids import RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.prefix import PageKey, PrefixCache
from pdrt.protocol.messages import Grant
from pdrt.scheduling.prefill_job import Chunk, PrefillJob

SCORED_TOKENS_MAX = 128
"""Prompt tokens whose log probabilities one step computes: each needs logits over the vocabulary,
and the copies made of them, in float32: 64 MiB a copy for 128 of 128,000 tokens."""
OVERTAKEN_MAX = 16
"""As many short prompts as may come while one long one drains; each of them may, at worst, put off
the oldest room by as long as it holds its pages."""


class _Step:
    """What is left of a step, and who gets how much of it."""

    def __init__(self, tokens: int, tokens_efficient: int, rows: int, page_size: int) -> None:
        self.tokens = tokens
        self.scored = SCORED_TOKENS_MAX
        self.rows = rows
        """Rooms that may still be looked at."""
        self.counts: dict[PrefillJob, int] = {}
        self.keys: set[PageKey] = set()
        """Of pages that are complete after it."""
        self._given = 0
        self._efficient = tokens_efficient
        self._has_completed = False
        self._page_size = page_size

    @property
    def is_over(self) -> bool:
        """Nobody gets any more of it."""
        return not self.tokens or (self._has_completed and self._given >= self._efficient)

    def give(self, job: PrefillJob, tokens: int, scored: int) -> None:
        """Up to so many tokens more for this room, of which so many may be scored."""
        given = self.counts.get(job, 0)
        start = job.computed + given
        unscored = job.unscored(start)
        count = min(tokens, job.end - start)
        if unscored > scored:
            count = min(count, scored)
        if count <= 0:
            return
        self.counts[job] = given + count
        self.tokens -= count
        self._given += count
        self.scored -= min(count, unscored)
        self._has_completed |= start + count == job.length
        size = self._page_size
        self.keys.update(job.keys[start // size : (start + count) // size])


class PrefillScheduler:
    """Rooms waiting for, and in, computation. One step is planned, run and finished at a time.

    The source pages of a room, cached and its own, stay its own until `forget`.
    """

    def __init__(
        self,
        layout: KvLayout,
        cache: PrefixCache,
        tokens_per_step_max: int,
        rows_per_step_max: int,
        *,
        tokens_efficient: int | None = None,
    ) -> None:
        """`tokens_efficient`: of a step that computes a token no slower than a full one does, more
        or less; None: only a full one does."""
        self.jobs: dict[RoomId, PrefillJob] = {}
        self._layout = layout
        self._cache = cache
        self._tokens_max = tokens_per_step_max
        self._tokens_efficient = tokens_efficient or tokens_per_step_max
        self._rows_max = rows_per_step_max
        # Those of `jobs` that are neither wholly computed nor stopped, oldest first.
        self._pending: dict[RoomId, PrefillJob] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    @property
    def queued(self) -> int:
        """Rooms without source pages."""
        return sum(not job.has_started for job in self._pending.values())

    @property
    def running(self) -> int:
        """Rooms that are being computed."""
        return sum(job.has_started for job in self._pending.values())

    def add(self, grant: Grant, now: float, *, is_blocked: bool = False) -> None:
        """Queue an opened room. `is_blocked`: its last token waits for `unblock`."""
        assert grant.room not in self.jobs, grant.room
        job = PrefillJob(grant, self._layout, now, is_caching=self._cache.is_enabled)
        job.is_blocked = is_blocked
        self.jobs[grant.room] = self._pending[grant.room] = job
        self._find(job)

    def unblock(self, room: RoomId) -> None:
        """Its last token may be computed now."""
        self.jobs[room].is_blocked = False

    def stop(self, room: RoomId) -> None:
        """Compute no more of it from the next step on. Its pages stay its own. Idempotent."""
        self._pending.pop(room, None)

    def forget(self, room: RoomId) -> list[int]:
        """The room is over; returns the source pages that it had, now to be released."""
        self.stop(room)
        job = self.jobs.pop(room)
        if job.is_scored:
            self._cache.count_bypass(job.computed)
        elif job.has_started:
            self._cache.count_lookup(job.cached, job.computed)
        return job.pages + job.spare

    def plan(self, now: float) -> list[Chunk]:
        """The next step's chunks; empty when nothing can run (no work, or no pages)."""
        step = _Step(
            self._tokens_max, self._tokens_efficient, self._rows_max, self._layout.page_size
        )
        for job in self._pending.values():
            if job.has_started:
                self._adopt(job)
            elif job.is_blocked:
                # All that it may compute now may have been found since: it needs no turn then.
                self._find(job)
        runnable = [job for job in self._pending.values() if job.remaining]
        waiting = self._start_oldest(runnable)
        oldest = next((job for job in runnable if job.has_started), None)
        if oldest is not None:
            step.rows -= 1
            step.give(oldest, (step.tokens + 1) // 2, (step.scored + 1) // 2)
        shortest = sorted(runnable, key=lambda job: job.remaining)
        self._plan_shortest(shortest, step, waiting)
        if oldest is not None and not step.is_over:
            step.give(oldest, step.tokens, step.scored)
        return [self._chunk(job, count, now) for job, count in step.counts.items()]

    def _start_oldest(self, runnable: Sequence[PrefillJob]) -> PrefillJob | None:
        """The oldest room, if it must wait for pages."""
        if not runnable or runnable[0].has_started:
            return None
        is_started = self._start(runnable[0], self._find(runnable[0]))
        return None if is_started else runnable[0]

    def _plan_shortest(
        self, shortest: Sequence[PrefillJob], step: _Step, waiting: PrefillJob | None
    ) -> None:
        """What is left of the step, for rooms in the order given. `waiting`: the oldest, where it
        waits for pages."""
        are_pages_left = True
        for job in shortest:
            if step.is_over or not step.rows:
                return
            may_start = waiting is None or waiting.overtaken < OVERTAKEN_MAX
            if job is waiting or not (job.has_started or (may_start and are_pages_left)):
                continue
            if job.unscored(job.position) and not step.scored:
                continue
            if job in step.counts:
                # The oldest, whose turn among the shortest has come.
                step.give(job, step.tokens, step.scored)
                continue
            step.rows -= 1
            found = [] if job.has_started else self._find(job)
            if self._sits_out(job, step):
                continue
            if not job.has_started:
                # Who comes next has no fewer tokens left, and so needs no fewer pages.
                are_pages_left = self._start(job, found)
                if not are_pages_left:
                    continue
                if waiting is not None:
                    waiting.overtaken += 1
            step.give(job, step.tokens, step.scored)

    # Pages

    def _find(self, job: PrefillJob) -> list[int]:
        """The cached pages that a room which has not started could begin with."""
        found = [] if job.is_scored else self._cache.match(job.keys[: job.findable])
        job.cached = len(found) * self._layout.page_size
        return found

    def _start(self, job: PrefillJob, found: list[int]) -> bool:
        """Give a room its source pages, or none: then it goes on waiting."""
        self._cache.hold(found, job.owner)
        try:
            own = self._cache.take(job.page_count - len(found), job.owner)
        except PoolExhausted:
            self._cache.release(found, job.owner)
            return False
        job.pages = found + own
        job.computed = job.cached
        return True

    def _adopt(self, job: PrefillJob) -> None:
        """What another room has computed in the meantime is read, and not computed again."""
        first = job.computed // self._layout.page_size
        if job.is_scored or first >= job.findable or not self._cache.knows(job.keys[first]):
            return
        found = self._cache.match(job.keys[first : job.findable])
        self._cache.hold(found, job.owner)
        end = first + len(found)
        job.spare += job.pages[first:end]
        job.pages[first:end] = found
        job.cached += end * self._layout.page_size - job.computed
        job.computed = end * self._layout.page_size

    def _sits_out(self, job: PrefillJob, step: _Step) -> bool:
        """Others compute as much for it in this step as its own turn would give it."""
        if job.is_scored:
            return False
        size = self._layout.page_size
        first = job.position // size
        shared = first
        while shared < job.findable and job.keys[shared] in step.keys:
            shared += 1
        alone = (job.position + min(job.remaining, step.tokens)) // size
        return shared > first and shared >= min(alone, job.findable)

    # Steps

    def _chunk(self, job: PrefillJob, count: int, now: float) -> Chunk:
        job.started_at = now if job.started_at is None else job.started_at
        end = job.computed + count
        written = job.pages[job.computed // self._layout.page_size : self._layout.pages_for(end)]
        # A forward writes into nothing that anybody else may read.
        assert all(self._cache.pages.owner(page) == job.owner for page in written), job.room
        return Chunk(job.room, job.computed, end, end == job.length)

    def finish(self, chunk: Chunk, now: float) -> int:
        """A chunk has been computed, well: what is full of it can be found from now on. Returns how
        many of the prompt's pages are complete."""
        job = self.jobs[chunk.room]
        assert job.computed == chunk.start, (chunk, job.computed)
        job.computed = chunk.end
        full = chunk.end // self._layout.page_size
        keys = job.keys[:full]
        self._cache.insert(keys, job.pages[: len(keys)], job.owner)
        if not chunk.is_last:
            return full
        job.computed_at = now
        self._pending.pop(chunk.room, None)
        return job.page_count

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        assert self._pending.keys() <= self.jobs.keys()
        for job in self.jobs.values():
            assert 0 <= job.computed <= job.length, job.room
            assert job.cached <= job.findable * self._layout.page_size, job.room
            assert len(job.pages) in (0, job.page_count), (job.room, len(job.pages))
            assert job.has_started or not (job.computed or job.spare), job.room
            assert job.overtaken <= OVERTAKEN_MAX, (job.room, job.overtaken)
