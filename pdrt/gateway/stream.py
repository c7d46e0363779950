"""One request's output on its way from the core to the task that answers the client."""

from __future__ import annotations

import asyncio

import msgspec

from pdrt.gateway.effects import Ended
from pdrt.ids import Incarnation


class Received(msgspec.Struct, frozen=True):
    """What there is to pass on."""

    token_ids: tuple[int, ...]
    ended: Ended | None
    """Set when nothing follows."""
    client_gone: bool


class OutputStream:
    """Written by the hub, read by one task.

    Holds at most `max_tokens` ids. What is not taken is not credited, and a worker that has no
    credit pauses, so in practice it holds no more than a worker's `stream_tokens_max`.
    """

    def __init__(self, serial: int, opened: float) -> None:
        self.serial = serial
        self.opened = opened
        self.decodes: list[Incarnation] = []
        """Decode workers that had the request, in order."""
        self.cached_tokens = 0
        self.first: float | None = None
        """When the first tokens came."""
        self.heard: float | None = None
        """When the newest tokens came; None before the first."""
        self._token_ids: list[int] = []
        self._ended: Ended | None = None
        self._client_gone = False
        self._event = asyncio.Event()

    def put(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids.extend(token_ids)
        self._event.set()

    def end(self, ended: Ended) -> None:
        assert self._ended is None, f"request {self.serial} ended twice"
        self._ended = ended
        self._event.set()

    def note_client_gone(self) -> None:
        self._client_gone = True
        self._event.set()

    async def receive(self) -> Received:
        """Everything new, as soon as there is something. May be cancelled without loss."""
        await self._event.wait()
        self._event.clear()
        received = Received(tuple(self._token_ids), self._ended, self._client_gone)
        self._token_ids.clear()
        return received
