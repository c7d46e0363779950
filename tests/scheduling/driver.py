"""A decode scheduler over real pages, driven event by event as the worker drives it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdrt.decode.pages import DecodePages, RoomPages
from pdrt.kv.pages import Owner, OwnerKind, PageTable
from pdrt.protocol.gateway_messages import FinishReason
from pdrt.sampling import Sampling
from pdrt.scheduling.decode import DecodeScheduler
from pdrt.scheduling.decode_request import DecodeRequest, LocalReason
from pdrt.scheduling.step_plan import StepLimits, StepPlan
from tests.scheduling.grants import LAYOUT, prompt, room, submit

EOS = 2
LIMIT = 64
STEP = (16, 6)
"""Prompt tokens of a step, alone and beside sequences that decode."""


class Decode:
    """A scheduler over the worker's own pages, driven as the worker drives it."""

    def __init__(
        self, pages: int = 40, seqs: int = 4, unread: int = 1000, is_caching: bool = True
    ) -> None:
        self.pages = PageTable(pages)
        self.kv = DecodePages(self.pages, LAYOUT, is_caching)
        self.scheduler = DecodeScheduler(LAYOUT, LIMIT, StepLimits(seqs, *STEP), unread, (EOS,))
        self.now = 0.0
        self.like: int | None = None
        """Whose prompt those that are submitted next begin with; each its own if None."""
        self.salt = ""
        self.leases: dict[int, RoomPages] = {}
        self.rooms = 0
        self.tokens = 10
        self.step: StepPlan | None = None

    def submit(
        self,
        serial: int,
        length: int = 5,
        output: Sequence[int] = (),
        **sampling: object,
    ) -> DecodeRequest:
        wanted = Sampling(**({"max_tokens": 30} | sampling))  # type: ignore[arg-type]
        message = msgspec.structs.replace(
            submit(serial, length, output, wanted),
            token_ids=prompt(self.like or serial, length),
            cache_salt=self.salt,
        )
        request = self.scheduler.submit(message, self.now)
        self.check()
        return request

    def admit(self) -> DecodeRequest | None:
        """The head, if there are pages for it."""
        request = self.scheduler.head()
        if request is None:
            return None
        wanted, name = self.scheduler.pages_wanted(request), room(self.rooms + 1)
        pages = self.kv.lease(request, name, wanted, 0)
        if pages is None:
            return None
        self.rooms += 1
        self.leases[self.rooms] = self.kv.keyed(pages, request)
        self.scheduler.admitted(request, name, self.now)
        self.check()
        return request

    def begin_here(self) -> DecodeRequest | None:
        """The head's prompt is computed by steps, if there are pages for it."""
        request = self.scheduler.head()
        if request is None:
            return None
        begin = self.kv.begin(request, self.scheduler.pages_here(request), 0)
        if begin is None:
            return None
        why = LocalReason.UNPAIRED
        self.scheduler.begin_here(request, why, begin.pages, begin.cached_tokens, self.now)
        self.check()
        return request

    def first_token(self, request: DecodeRequest) -> FinishReason | None:
        self.scheduler.first_token(request, 0, self.now)
        return self.take_token(request)

    def take_token(self, request: DecodeRequest, token: int | None = None) -> FinishReason | None:
        self.tokens += 1
        return self.scheduler.take_token(request, self.tokens if token is None else token)

    def ready(self, request: DecodeRequest) -> None:
        assert request.room is not None
        name, pages = request.room, self.leases.pop(request.room.serial)
        self.kv.landed(name, pages)
        self.kv.pass_on(name, pages, request.request)
        self.scheduler.ready(request, pages.all, len(request.tokens) - 1, self.now)
        self.check()

    def end_lease(self, serial: int) -> None:
        self.kv.end_lease(room(serial), self.leases.pop(serial))

    def fail(self, request: DecodeRequest) -> None:
        """Its room ends; the lease is drained later."""
        self.scheduler.requeue(request, self.now)
        self.check()

    def run(self, serial: int, length: int = 5, **sampling: object) -> DecodeRequest:
        """A request that is decoded."""
        request = self.submit(serial, length, **sampling)
        assert self.admit() is request
        self.first_token(request)
        self.ready(request)
        return request

    def plan(self) -> list[int]:
        """Serials of those in the next step, which runs from now on."""
        self.step = self.scheduler.plan(self.kv, self.now)
        assert all(map(self.kv.is_writable, self.step.sequences))
        assert self.step.tokens == sum(r.step_tokens for r in self.step.sequences)
        self.check()
        return [request.request.serial for request in self.step.sequences]

    def grow_ahead(self) -> None:
        self.scheduler.grow_ahead(self.kv)
        self.check()

    def finish_step(self) -> dict[int, FinishReason | None]:
        assert self.step is not None
        ends: dict[int, FinishReason | None] = {}
        for request in self.step.sequences:
            self.scheduler.stepped(request)
            if request.ended is not None:
                self.remove(request)
            elif request.prefills_here and request.computed < len(request.tokens):
                continue
            else:
                ends[request.request.serial] = end = self._token_after(request)
                if end is not None:
                    self.remove(request)
        self.step = None
        self.check()
        return ends

    def _token_after(self, request: DecodeRequest) -> FinishReason | None:
        if request.prefills_here:
            self.kv.keep(request)
            self.scheduler.prefilled_here(request, self.now)
        wants_token = self.scheduler.wants_token(request)
        return self.take_token(request) if wants_token else FinishReason.LENGTH

    def fail_step(self) -> None:
        """Prompts in it bear the blame alone."""
        assert self.step is not None
        has_prompts = any(request.prefills_here for request in self.step.sequences)
        for request in self.step.sequences:
            self.scheduler.step_failed(request)
            if request.prefills_here or not has_prompts or request.ended is not None:
                self.kv.release(request)
                self.scheduler.remove(request)
        self.step = None
        self.check()

    def remove(self, request: DecodeRequest) -> None:
        self.kv.give_back(request)
        self.scheduler.remove(request)

    def occupy(self, count: int) -> None:
        """Somebody else takes pages and keeps them."""
        self.kv.cache.take(count, Owner(OwnerKind.ROOM, "somebody"))

    def check(self) -> None:
        self.scheduler.check()
        self.pages.check()
        self.kv.cache.check()
        self.kv.check_sequences({r.request: r.pages for r in self.scheduler.requests.values()})
        self.kv.check_rooms({room(serial): pages for serial, pages in self.leases.items()})


def preempted(decode: Decode) -> list[int]:
    assert decode.step is not None
    return [request.request.serial for request in decode.step.preempted]
