"""Outputs on their way from the core to the task that answers the client."""

from __future__ import annotations

import asyncio

import msgspec

from pdrt.gateway.effects import Deliver, DeliverPrompt, Ended
from pdrt.ids import Incarnation
from pdrt.sampling import TokenLogprobs


class Received(msgspec.Struct, frozen=True, gc=False):
    """What there is to pass on of one output."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, where they are asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    """Once, with or before the first tokens."""
    ended: Ended | None
    """Set when nothing follows."""


class Outputs:
    """The outputs of one answer: read by its one task, which wakes when any of them has news."""

    def __init__(self) -> None:
        self.client_gone = False
        self._news: list[OutputStream] = []
        """In the order in which they got it, each once."""
        self._reader: asyncio.Future[None] | None = None
        """What the task waits for, if it does. It waits once per token: for a future, which is
        what an `asyncio.Event` would make anew each time."""

    def add(self, stream: OutputStream) -> None:
        self._news.append(stream)
        self._wake()

    def note_client_gone(self) -> None:
        self.client_gone = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def receive(self) -> list[OutputStream]:
        """Those with something new, as soon as there is one, or the client is gone. May be
        cancelled without loss."""
        if not self._news and not self.client_gone:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        news, self._news = self._news, []
        return news


class OutputStream:
    """Written by the hub, read by the answer's task.

    Holds at most `max_tokens` ids. What is not taken is not credited, and a worker that has no
    credit pauses, so in practice it holds no more than a worker's `stream_tokens_max`.
    """

    def __init__(self, serial: int, opened: float, outputs: Outputs) -> None:
        self.serial = serial
        self.opened = opened
        self.decodes: list[Incarnation] = []
        """Decode workers that had the request, in order."""
        self.prefills: list[Incarnation] = []
        """Prefill workers that computed its prompt, in order, as far as they are known."""
        self.cached_tokens = 0
        self.first: float | None = None
        """When the first tokens came."""
        self.heard: float | None = None
        """When the newest tokens came; None before the first."""
        self._outputs = outputs
        self._has_news = False
        """It is in the list of `outputs`."""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._ended: Ended | None = None

    def put(self, deliver: Deliver) -> None:
        self._token_ids.extend(deliver.token_ids)
        self._logprobs.extend(deliver.logprobs)
        self._note(deliver)

    def put_prompt(self, deliver: DeliverPrompt) -> None:
        self._prompt_logprobs = deliver.logprobs
        self._note(deliver)

    def end(self, ended: Ended) -> None:
        assert self._ended is None, f"request {self.serial} ended twice"
        self._ended = ended
        self.cached_tokens = ended.cached_tokens
        self._wake()

    def _note(self, deliver: Deliver | DeliverPrompt) -> None:
        self.cached_tokens = deliver.cached_tokens
        if deliver.prefill is not None and deliver.prefill not in self.prefills[-1:]:
            self.prefills.append(deliver.prefill)
        self._wake()

    def _wake(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._outputs.add(self)

    def take(self) -> Received:
        """Everything new."""
        self._has_news = False
        received = Received(
            tuple(self._token_ids), tuple(self._logprobs), self._prompt_logprobs, self._ended
        )
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = None
        return received
