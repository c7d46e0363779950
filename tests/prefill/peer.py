"""A decode leader whose lines are written by the test, and the prefill worker that hears them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from pdrt.ids import Incarnation, RoomId, routing_id
from pdrt.kv.pool import KvPool
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.messages import (
    Drained,
    Fingerprint,
    FirstToken,
    Grant,
    Hello,
    PrefillToDecode,
    Reason,
    Revoke,
    Segment,
    Welcome,
)
from pdrt.sampling import Sampling
from pdrt.transfer.channel import DealerChannel
from pdrt.transfer.local import LocalReceiver
from tests.decode.deployment import (
    FRAME_BYTES,
    Deployment,
    GatewayPeer,
    prompt_of,
    until,
)
from tests.prefill.executor import LAYOUT, StandInExecutor, position_value

PAGES = 32


class DecodePeer:
    """A decode leader: a pool, a channel, and what it has heard."""

    def __init__(self, worker: Any, incarnation: int) -> None:
        self.incarnation = Incarnation(incarnation)
        self.worker = worker
        self.writer: Incarnation = worker.incarnation
        self.executor = StandInExecutor(PAGES)
        self.pool: KvPool = self.executor.pool
        self.fingerprint: Fingerprint = worker.fingerprint
        self.welcomes: list[Welcome] = []
        self.heard: list[FirstToken | Drained] = []
        self._decoder: Decoder[PrefillToDecode] = Decoder(PrefillToDecode, FRAME_BYTES)
        self._seqs = itertools.count(1)
        self.channel = DealerChannel(
            worker.handover.endpoint, routing_id(self.incarnation), self._hear, FRAME_BYTES
        )

    def _hear(self, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        if isinstance(message, Welcome):
            self.welcomes.append(message)
        else:
            self.heard.append(message)

    async def say(self, message: Any) -> None:
        await asyncio.sleep(0)  # the worker's loop runs by now
        await until(lambda: self.channel.send(encode(message)), "a connection")

    async def hello(self, generation: int = 1, segment: Segment | None = None) -> Welcome:
        receiver = LocalReceiver(self.pool)
        segment = segment or await receiver.open_segment(0, "", generation)
        count = len(self.welcomes)
        hello = Hello(
            decode=self.incarnation,
            seq=next(self._seqs),
            fingerprint=self.fingerprint,
            generation=generation,
            segments=(segment,),
            floor=generation,
        )
        await self.say(hello)
        await until(lambda: len(self.welcomes) > count, "a Welcome")
        return self.welcomes[-1]

    def make_grant(self, serial: int, length: int, pages: tuple[int, ...] | None = None) -> Grant:
        wanted = tuple(range(LAYOUT.pages_for(length))) if pages is None else pages
        return Grant(
            room=RoomId(self.incarnation, serial),
            writer=self.writer,
            seq=next(self._seqs),
            generation=1,
            pages=wanted,
            first_page=0,
            token_ids=tuple(prompt_of(length, serial)),
            output_tokens=0,
            sampling=Sampling(max_tokens=8, temperature=0.0),
            seconds_max=60.0,
        )

    async def revoke(self, serial: int) -> None:
        await self.say(
            Revoke(
                room=RoomId(self.incarnation, serial),
                writer=self.writer,
                seq=next(self._seqs),
                generation=1,
                reason=Reason.CLIENT_GONE,
            )
        )

    async def drained(self, serial: int) -> Drained:
        def found() -> list[Drained]:
            return [m for m in self.heard if isinstance(m, Drained) and m.room.serial == serial]

        await until(found, f"the end of room {serial}")
        (drained,) = found()
        return drained

    def landed(self, grant: Grant) -> None:
        """Every position of the prompt is in the pages that were granted."""
        for place, token in enumerate(grant.token_ids):
            assert self.executor.read(grant.pages, place) == position_value(token, place)

    def close(self) -> None:
        self.channel.close()
        self.executor.close()


class Prefill:
    """One prefill worker and its decode leaders."""

    def __init__(self) -> None:
        self.deployment = Deployment(GatewayPeer())
        self.executor = StandInExecutor(PAGES)
        self.worker = self.deployment.add_prefill(self.executor, self.deployment.config())
        self.peers: list[DecodePeer] = []

    def peer(self, incarnation: int = 0xD0) -> DecodePeer:
        self.peers.append(DecodePeer(self.worker, incarnation))
        return self.peers[-1]
