"""A decode worker's scheduler: admission, sequences, preemption, and whose room is whose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pdrt.errors import PoolExhausted
from pdrt.ids import RoomId
from pdrt.kv.pages import CACHE, Owner, OwnerKind
from pdrt.kv.prefix import page_keys
from pdrt.protocol.leases import GrantRequest
from pdrt.protocol.messages import Reason
from pdrt.sampling import Sampling
from tests.sim.core import Kind, Violation
from tests.sim.plan import CONFIG, PAGE_SIZE
from tests.sim.requests import Request
from tests.sim.tokens import next_token, page_content, pages_for

if TYPE_CHECKING:
    from tests.sim.decode import DecodeWorker

STEP_SECONDS = 0.04
CHUNK_TOKENS = 6
"""Of a prompt that is computed here, in one step: chunks end within pages."""


class Job:
    """One attempt at a request on this decode worker."""

    def __init__(self, request: Request, worker: DecodeWorker) -> None:
        self.request = request
        self.worker = worker
        self.tokens = [*request.prompt, *request.tokens]
        self.prompt_length = len(request.prompt)
        self.rooms = 0
        self.room: RoomId | None = None
        """The one it waits for."""
        self.sequence: Sequence | None = None
        self.is_over = False

    @property
    def output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_complete(self) -> bool:
        return self.output >= self.request.max_tokens

    def emit(self, token: int) -> None:
        self.tokens.append(token)
        self.request.take(self, token)

    def end(self, error: str | None) -> None:
        self.is_over = True
        self.room = None
        self.request.finish(self, error)


class Leased:
    """What the worker keeps of one lease."""

    def __init__(
        self, pages: tuple[int, ...], held: list[int], owner: Owner, tokens: tuple[int, ...]
    ) -> None:
        self.pages = pages
        """Granted; the lease's own."""
        self.held = held
        """Cached ones before them."""
        self.owner = owner
        self.tokens = tokens

    @property
    def all_pages(self) -> list[int]:
        return [*self.held, *self.pages]


class Sequence:
    """A sequence that decodes: its pages, by index."""

    def __init__(self, job: Job, pages: list[int], computed: int, owner: Owner) -> None:
        self.job = job
        self.owner = owner
        self.pages = pages
        self.computed = computed
        """Tokens whose KV is in place."""


class Scheduler:
    def __init__(self, worker: DecodeWorker) -> None:
        self.worker = worker
        self.world = worker.world
        self.queue: list[Job] = []
        self.leased: dict[RoomId, Leased] = {}
        self.jobs: dict[RoomId, Job] = {}
        """Of every alive lease; the job may have gone on in another room."""
        self.sequences: list[Sequence] = []
        self._serial = 0

    # Jobs

    def submit(self, job: Job) -> None:
        if not job.is_over:
            self.queue.append(job)

    def cancel(self, job: Job, reason: Reason) -> Iterable[Any]:
        """Compute stops, pages come back after the drain; the client waits for nothing."""
        room = job.room
        if job.is_over:
            return []
        job.end(reason.value)
        if job in self.queue:
            self.queue.remove(job)
        if job.sequence is not None:
            self.end_sequence(job.sequence)
        return [] if room is None else self.worker.revoke(room, reason)

    def expire(self, now: float) -> Iterable[Any]:
        effects: list[Any] = []
        waiting = [job for job in self.jobs.values() if job.room is not None]
        for job in {id(j): j for j in (*self.queue, *waiting)}.values():
            if now > job.request.deadline:
                effects += self.cancel(job, Reason.DEADLINE)
        return effects

    # Admission

    def admit(self) -> Iterable[Any]:
        """Open rooms for as many jobs as there are pages and writers for; others are computed
        here."""
        effects: list[Any] = []
        for job in list(self.queue):
            endpoints = self.worker.table.usable_endpoints()
            if self.worker.table.refuses(self.world.sim.now):
                break
            if not endpoints or job.rooms >= CONFIG.rooms_per_request_max:
                granted = self.begin_here(job) if self.world.plan.local_prefill else None
            else:
                granted = self.open_room(job, self.world.sim.rng.choice(endpoints))
            if granted is None:
                break
            self.queue.remove(job)
            effects += granted
        return effects

    def begin_here(self, job: Job) -> Iterable[Any] | None:
        """A sequence from the start, in pages of its own: nobody else writes into them."""
        cache, left = self.worker.cache, job.request.max_tokens - job.output
        self._serial += 1
        owner = Owner(OwnerKind.SEQUENCE, self._serial)
        # The last token is computed in any case: the next one is sampled from it.
        held = cache.match(page_keys(job.tokens, PAGE_SIZE)[: (len(job.tokens) - 1) // PAGE_SIZE])
        cache.hold(held, owner)
        try:
            own = cache.take(pages_for(len(job.tokens) + (left > 1)) - len(held), owner)
        except PoolExhausted:
            cache.release(held, owner)
            return None
        self.world.prompts_here += 1
        sequence = job.sequence = Sequence(job, held + own, len(held) * PAGE_SIZE, owner)
        self.sequences.append(sequence)
        self.world.sim.after(STEP_SECONDS, self.worker.post, self.compute, sequence)
        return []

    def compute(self, sequence: Sequence) -> Iterable[Any] | None:
        """One step: a part of a prompt, and after the last one the next token."""
        job = sequence.job
        if sequence not in self.sequences:
            return None
        if self.world.chance(self.world.plan.rates.forward_fails):
            self.end_sequence(sequence)
            job.end(Reason.FORWARD_FAILED.value)
            return self.admit()
        start = sequence.computed
        sequence.computed = min(start + CHUNK_TOKENS, len(job.tokens))
        self.fill(sequence, start)
        if sequence.computed < len(job.tokens):
            self.world.sim.after(STEP_SECONDS, self.worker.post, self.compute, sequence)
            return None
        self.keep(job.tokens, sequence.pages, sequence.owner)
        if not job.is_complete:
            job.emit(next_token(job.tokens))
        if job.is_complete:
            self.finish(sequence)
            return self.admit()
        self.world.sim.after(STEP_SECONDS, self.worker.post, self.step, sequence)
        return None

    def fill(self, sequence: Sequence, start: int) -> None:
        """The KV of its tokens from `start` on, on every rank."""
        tokens, cache = sequence.job.tokens[: sequence.computed], self.worker.cache
        for index in range(start // PAGE_SIZE, pages_for(sequence.computed)):
            page = sequence.pages[index]
            assert cache.pages.owner(page) == sequence.owner, (page, "is somebody else's")
            content = page_content(tokens, index)
            for rank in self.worker.content:
                rank[page][:] = [content] * len(rank[page])

    def open_room(self, job: Job, endpoint: str) -> Iterable[Any] | None:
        table, worker = self.worker.table, self.worker
        room = table.next_room()
        owner = Owner(OwnerKind.LEASE, room)
        tokens = tuple(job.tokens)
        left = job.request.max_tokens - job.output
        held: list[int] = []
        pages: tuple[int, ...] = ()
        written = 0
        if left > 1:
            held = worker.cache.match(page_keys(tokens, PAGE_SIZE))
            worker.cache.hold(held, owner)
            written = pages_for(len(tokens)) - len(held)
            wanted = pages_for(len(tokens) + 1) - len(held)
            try:
                pages = tuple(worker.cache.take(wanted, owner))
            except PoolExhausted:
                worker.cache.release(held, owner)
                return None
        job.room, job.rooms = room, job.rooms + 1
        self.jobs[room] = job
        self.leased[room] = Leased(pages, held, owner, tokens)
        seconds = max(job.request.deadline - self.world.sim.now, 0.1)
        self.world.rooms += 1
        request = GrantRequest(
            pages=pages,
            written_pages=written,
            first_page=len(held),
            token_ids=tokens,
            output_tokens=job.output,
            sampling=Sampling(max_tokens=job.request.max_tokens),
            seconds_max=seconds,
        )
        return table.grant(endpoint, request, self.world.sim.now)

    # Effects of the lease table

    def first_token(self, room: RoomId, token: int) -> None:
        job = self.jobs[room]
        if job.room != room:
            raise Violation(Kind.TOKEN, f"first token of {room}, which was withdrawn")
        job.emit(token)

    def ready(self, room: RoomId) -> None:
        leased, job = self.leased.pop(room), self.jobs.pop(room)
        assert job.room == room, (room, "ready although withdrawn")
        job.room = None
        self._serial += 1
        owner = Owner(OwnerKind.SEQUENCE, self._serial)
        self.keep(leased.tokens, leased.all_pages, leased.owner)
        pages = self.worker.pages
        cached = [page for page in leased.all_pages if pages.owner(page) is CACHE]
        own = [page for page in leased.all_pages if pages.owner(page) is not CACHE]
        self.worker.cache.pass_hold(cached, leased.owner, owner)
        pages.pass_on(own, leased.owner, owner)
        computed = len(leased.tokens)
        sequence = job.sequence = Sequence(job, leased.all_pages, computed, owner)
        if sequence.pages:
            if job.output == 0 or len(job.tokens) != len(leased.tokens) + 1:
                raise Violation(Kind.TOKEN, f"{room} is ready without its first token")
            self.verify(sequence)
        if job.is_complete:
            self.finish(sequence)
        else:
            self.sequences.append(sequence)
            self.world.sim.after(STEP_SECONDS, self.worker.post, self.step, sequence)

    def room_failed(self, room: RoomId, reason: Reason, retryable: bool) -> None:
        """The job ends, or goes on in another room with other pages."""
        job = self.jobs[room]
        if job.room != room:
            return
        job.room = None
        goes_on_here = self.world.plan.local_prefill and reason is not Reason.FORWARD_FAILED
        if job.is_complete:
            job.end(None)
        elif not retryable or (job.rooms >= CONFIG.rooms_per_request_max and not goes_on_here):
            job.end(reason.value)
        else:
            self.queue.append(job)

    def free_lease(self, room: RoomId) -> None:
        leased = self.leased.pop(room)
        job = self.jobs.pop(room)
        assert job.room != room, (room, "ended under its request")
        self.worker.cache.release(leased.all_pages, leased.owner)

    # Sequences

    def verify(self, sequence: Sequence) -> None:
        """I6: every page, on every rank and head, holds this sequence's own tokens."""
        tokens = sequence.job.tokens[: sequence.computed]
        pages = sequence.pages
        for index in range(pages_for(len(tokens))):
            wanted = page_content(tokens, index)
            for rank, content in enumerate(self.worker.content):
                if any(head != wanted for head in content[pages[index]]):
                    raise Violation(
                        Kind.CONTENT,
                        f"{self.worker.name}: page {index} (pool page {pages[index]}, rank {rank}) "
                        f"of request {sequence.job.request.serial}",
                    )

    def step(self, sequence: Sequence) -> Iterable[Any] | None:
        """One decode step: the last token's KV, and the next token."""
        job = sequence.job
        if sequence not in self.sequences:
            return None
        if len(sequence.pages) * PAGE_SIZE <= sequence.computed:
            try:
                sequence.pages += self.worker.cache.take(1, sequence.owner)
            except PoolExhausted:
                self.preempt(sequence)
                return self.admit()
        sequence.computed += 1
        page_index = (sequence.computed - 1) // PAGE_SIZE
        content = page_content(job.tokens[: sequence.computed], page_index)
        for rank in self.worker.content:
            page = rank[sequence.pages[page_index]]
            page[:] = [content] * len(page)
        job.emit(next_token(job.tokens))
        if job.is_complete:
            self.finish(sequence)
            return self.admit()
        self.world.sim.after(STEP_SECONDS, self.worker.post, self.step, sequence)
        return None

    def preempt(self, sequence: Sequence) -> None:
        """Its pages go; it is resumed by a new room, which computes them again."""
        self.world.preemptions += 1
        self.end_sequence(sequence)
        sequence.job.rooms = 0
        self.queue.append(sequence.job)

    def finish(self, sequence: Sequence) -> None:
        sequence.job.end(None)
        if sequence.pages:
            self.verify(sequence)
            tokens = sequence.job.tokens[: sequence.computed]
            self.keep(tokens, sequence.pages, sequence.owner)
        self.end_sequence(sequence)

    def keep(self, tokens: Iterable[int], pages: list[int], owner: Owner) -> None:
        """The full pages of what is in place become cached ones."""
        keys = page_keys(tuple(tokens), PAGE_SIZE)[: len(pages)]
        self.worker.cache.insert(keys, pages[: len(keys)], owner)

    def end_sequence(self, sequence: Sequence) -> None:
        sequence.job.sequence = None
        if sequence in self.sequences:
            self.sequences.remove(sequence)
        self.worker.cache.release(sequence.pages, sequence.owner)
