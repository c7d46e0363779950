"""What the pure halves of the hand-over ask their workers to do. Values only.

A worker applies the effects of one event, in order, before it passes in the next event. Those with
a tag are told to every rank as they are.
"""

from __future__ import annotations

import msgspec

from pdrt.ids import Incarnation, RoomId
from pdrt.protocol.messages import (
    DecodeToPrefill,
    FirstTokenData,
    Grant,
    PrefillToDecode,
    RankProcess,
    Reason,
    Segment,
    SliceChecksums,
)
from pdrt.sampling import TokenLogprobs

# Of the decode half


class SendToPrefill(msgspec.Struct, frozen=True):
    """Send now, or count as sent: the message's `seq` is already taken."""

    endpoint: str
    message: DecodeToPrefill


class Connect(msgspec.Struct, frozen=True):
    """Dial a prefill endpoint."""

    endpoint: str


class Disconnect(msgspec.Struct, frozen=True):
    """Nothing is left to say to this endpoint."""

    endpoint: str


class OpenSegment(msgspec.Struct, frozen=True, tag=True):
    """On every rank: expose the pool to this prefill worker; answer `segment_opened`."""

    endpoint: str
    generation: int


class CloseOffers(msgspec.Struct, frozen=True, tag=True):
    """On every rank: the writer has taken `engine`; close what this generation shows beside it.
    Nothing was ever written through that, so nobody waits for it."""

    endpoint: str
    generation: int
    engine: str


class CloseSegment(msgspec.Struct, frozen=True, tag=True):
    """On every rank: tear the segment down so that nobody can write through it any more; answer
    `segment_closed` once that is certain."""

    endpoint: str
    generation: int


class OpenFence(msgspec.Struct, frozen=True):
    """Take the means to fence this writer in hand; answer `fence_opened` or `fence_refused`, and
    later `writer_dead` when all its processes are gone."""

    endpoint: str
    writer: Incarnation
    ranks: tuple[RankProcess, ...]


class CloseFence(msgspec.Struct, frozen=True):
    """Nothing of this writer is left to fence."""

    endpoint: str
    writer: Incarnation


class KillWriter(msgspec.Struct, frozen=True):
    """Kill every process of this writer; `writer_dead` follows."""

    endpoint: str
    writer: Incarnation
    why: str


class TakeFirstToken(msgspec.Struct, frozen=True):
    """Stream the first token to the client. At most once per room."""

    room: RoomId
    first: FirstTokenData


class LeaseReady(msgspec.Struct, frozen=True):
    """Pages of the lease pass to its sequence, in this same step."""

    room: RoomId
    bytes_written: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class ChecksumPages(msgspec.Struct, frozen=True, tag=True):
    """On every rank: compute the same checksums over what has landed in `pages`; answer
    `checksummed`. The lease may be gone by then."""

    room: RoomId
    pages: tuple[int, ...]
    slices: tuple[SliceChecksums, ...]
    """As sent."""


class PagesDiffer(msgspec.Struct, frozen=True):
    """For people: what landed in these pages is not what was sent."""

    room: RoomId
    writer: Incarnation
    indices: tuple[int, ...]
    """Of the pages, in the prompt."""
    pages: tuple[int, ...]
    """The same, in the pool."""


class FailRoom(msgspec.Struct, frozen=True):
    """The room gives no KV. Its request ends, or goes on in another room with other pages."""

    room: RoomId
    reason: Reason
    retryable: bool
    detail: str


class EndLease(msgspec.Struct, frozen=True):
    """The lease is gone and its pages are proved quiet: free them. The one place where leased
    pages become free."""

    room: RoomId


class EndWorker(msgspec.Struct, frozen=True):
    """This worker cannot go on safely and must exit."""

    why: str


DecodeEffect = (
    SendToPrefill
    | Connect
    | Disconnect
    | OpenSegment
    | CloseOffers
    | CloseSegment
    | OpenFence
    | CloseFence
    | KillWriter
    | TakeFirstToken
    | ChecksumPages
    | PagesDiffer
    | LeaseReady
    | FailRoom
    | EndLease
    | EndWorker
)

# Of the prefill half


class SendToDecode(msgspec.Struct, frozen=True):
    """Send to the peer whose routing id is `decode`."""

    decode: Incarnation
    message: PrefillToDecode


class OpenEngine(msgspec.Struct, frozen=True, tag=True):
    """On every rank: reach these segments; answer `engine_opened` or `engine_refused`."""

    decode: Incarnation
    generation: int
    segments: tuple[Segment, ...]


class CloseEngine(msgspec.Struct, frozen=True, tag=True):
    """On every rank: destroy the instance; answer `engine_closed` once it can touch nothing."""

    decode: Incarnation
    generation: int


class OpenRoom(msgspec.Struct, frozen=True):
    """On every rank, in FIFO order before the forwards that fill the room; then queue it."""

    grant: Grant


class CloseRoom(msgspec.Struct, frozen=True):
    """On every rank that has not reported: submit nothing more; and compute nothing more."""

    room: RoomId
    reason: Reason
    detail: str


class ReleaseSource(msgspec.Struct, frozen=True):
    """Nobody reads the room's source pages any more: free them. The one place where a room's
    pages become free."""

    room: RoomId


PrefillEffect = (
    SendToDecode | OpenEngine | CloseEngine | OpenRoom | CloseRoom | ReleaseSource | EndWorker
)
