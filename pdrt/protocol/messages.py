"""What decode leaders and prefill leaders say to each other: one union per direction.

Frozen, tagged, versioned msgspec structs. A frame that does not decode is counted and dropped
by whoever received it; it changes nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from pdrt.context import RequestContext
from pdrt.ids import Incarnation, RoomId
from pdrt.kv.layout import KvLayout
from pdrt.sampling import Sampling, TokenId, TokenLogprobs

PROTOCOL_VERSION = 4
Natural = Annotated[int, Meta(ge=0)]
"""A count, an index or a page; a frame with a negative one does not decode."""
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Finite: a deadline that is no number would never come."""


class Outcome(Enum):
    """How a room ended, on one rank or on all of them."""

    COMPLETE = "complete"
    """Everything that was wanted has landed."""
    ENDED = "ended"
    """Aborted or failed, and settled: the pages are clean."""
    UNSETTLED = "unsettled"
    """Quiet, but something of it may still land: the writer needs a fence."""


class Reason(Enum):
    """Why a lease was revoked or a room ended other than by completing."""

    CLIENT_GONE = "client_gone"
    FINISHED = "finished"
    """The request ended with the tokens that it has."""
    DEADLINE = "deadline"
    REJECTED = "rejected"
    """The prompt cannot be served by this worker; another one would say the same."""
    OVERLOADED = "overloaded"
    FORWARD_FAILED = "forward_failed"
    WRITE_FAILED = "write_failed"
    WRITE_UNSETTLED = "write_unsettled"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    """COMPLETE was said, but what landed is not what was sent (`--kv-checksum`)."""
    TASK_FAILED = "task_failed"
    INBOX_FULL = "inbox_full"
    SHUTDOWN = "shutdown"
    DECODE_LOST = "decode_lost"
    BELOW_FLOOR = "below_floor"
    UNKNOWN_ROOM = "unknown_room"
    GRANT_LOST = "grant_lost"
    WRITER_LOST = "writer_lost"
    NO_FIRST_TOKEN = "no_first_token"
    FENCED = "fenced"


NOT_RETRYABLE = frozenset({Reason.CLIENT_GONE, Reason.FINISHED, Reason.DEADLINE, Reason.REJECTED})
"""After these the request ends; after any other reason it may go on in a new room."""
TURNED_AWAY = frozenset({Reason.SHUTDOWN, Reason.OVERLOADED, Reason.BELOW_FLOOR})
"""Nothing was begun: no failure of the request, which waits until its writer, or another, welcomes
grants again."""


class Fingerprint(msgspec.Struct, frozen=True):
    """What two workers must have in common to be paired; compared field by field so that a
    refusal can name both values."""

    model: str
    digest: str
    """Hash of configuration, tokenizer and weight index."""
    layout: KvLayout
    """Page size, heads, layers, head size and dtype of the KV."""
    protocol_version: int = PROTOCOL_VERSION
    kv_checksum: bool = False
    """Pages count as landed once they hold what was sent (`--kv-checksum`)."""

    def differences(self, other: Fingerprint) -> list[str]:
        """`field: ours != theirs` for every field that differs."""
        pairs = [
            ("protocol_version", self.protocol_version, other.protocol_version),
            ("model", self.model, other.model),
            ("model digest", self.digest, other.digest),
            ("dtype", self.layout.dtype, other.layout.dtype),
            ("page_size", self.layout.page_size, other.layout.page_size),
            ("kv_heads", self.layout.kv_heads, other.layout.kv_heads),
            ("layers", self.layout.layers, other.layout.layers),
            ("head_dim", self.layout.head_dim, other.layout.head_dim),
            ("kv_checksum", self.kv_checksum, other.kv_checksum),
        ]
        return [f"{name}: {ours} != {theirs}" for name, ours, theirs in pairs if ours != theirs]


class Segment(msgspec.Struct, frozen=True):
    """What one decode rank exposes to one prefill worker through one engine. Its name is (decode
    incarnation, rank, prefill worker, generation, engine), of which the `Hello` that carries it
    says the rest."""

    rank: Natural
    engine: str
    descriptor: bytes
    """The engine's own encoding of how its peer reaches the memory."""


class Load(msgspec.Struct, frozen=True):
    """How busy a worker is."""

    running: Natural = 0
    queued: Natural = 0
    pages_free: Natural = 0
    pages_total: Natural = 0


class RankProcess(msgspec.Struct, frozen=True):
    """One process of a writer, as `local` needs it for its fence."""

    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, clock ticks since boot: tells a reused pid."""
    pid_namespace: int
    """Inode of /proc/self/ns/pid: a pid means nothing in another namespace."""


class FirstTokenData(msgspec.Struct, frozen=True):
    """The token sampled at the end of a prefill."""

    token: TokenId
    prompt_tokens: Natural
    """Tokens that the grant carried."""
    cached_tokens: Natural = 0
    """Of those, found in the prefill worker's prefix cache: not computed for this room."""
    logprobs: TokenLogprobs | None = None
    """Where `Sampling.logprobs` asks for them."""


class SliceChecksums(msgspec.Struct, frozen=True, array_like=True):
    """What one prefill rank sent to one decode rank: the same slice of every page that it wrote."""

    decode_rank: Natural
    offset: Natural
    """Bytes from the start of a page in the receiver's pool."""
    length: Natural
    """Bytes."""
    pages: tuple[Natural, ...]
    """xxh3, 64 bits, of the slice of each page, in the order of the grant."""


# Decode leader -> prefill leader


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Handshake and heartbeat, to whoever answers on the endpoint."""

    decode: Incarnation
    seq: int
    fingerprint: Fingerprint
    generation: int
    segments: tuple[Segment, ...]
    """Of every rank, one for each engine that this worker offers."""
    floor: int
    """The lowest generation still alive."""
    load: Load = Load()


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Publishes destination pages. Sent at most once."""

    room: RoomId
    writer: Incarnation
    seq: int
    generation: int
    pages: tuple[Natural, ...]
    """Destination pages of the whole prompt from `first_page` on; none for a request that needs
    none."""
    first_page: Natural
    """Index, in the prompt, of the first page wanted: the decode side holds those before it."""
    token_ids: tuple[Natural, ...]
    """Prompt, then the output tokens that exist already."""
    output_tokens: Natural
    """How many of `token_ids` are output."""
    sampling: Sampling
    seconds_max: Seconds
    """How long the room may take, counted from receipt."""
    cache_salt: str = ""
    """Prefixes are shared between requests of the same salt only."""
    context: RequestContext = RequestContext()


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Withdraws destination pages. Sent until answered."""

    room: RoomId
    writer: Incarnation
    seq: int
    generation: int
    reason: Reason


# Prefill leader -> decode leader


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answers a `Hello`, echoing what it said; or refuses in words a person can act on."""

    decode: Incarnation
    seq: int
    generation: int
    floor: int
    writer: Incarnation
    ranks: tuple[RankProcess, ...]
    fingerprint: Fingerprint
    engines: tuple[str, ...]
    """All that this worker has, best first."""
    engine: str | None = None
    """What it writes through on `generation`: never another one in the same generation."""
    passed_over: tuple[str, ...] = ()
    """Why that is none of the better ones, in words."""
    rooms: tuple[int, ...] = ()
    """Serials of the rooms of this decode incarnation that are alive."""
    load: Load = Load()
    refusal: str | None = None


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Sent the moment it is sampled, before the KV has landed."""

    room: RoomId
    writer: Incarnation
    first: FirstTokenData


class Drained(msgspec.Struct, frozen=True, tag=True):
    """The end of a room. Final."""

    room: RoomId
    writer: Incarnation
    outcome: Outcome
    reason: Reason | None = None
    """None when COMPLETE."""
    retryable: bool = True
    bytes_written: Natural = 0
    first: FirstTokenData | None = None
    detail: str = ""
    """Words for a person."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """When COMPLETE and `Sampling.prompt_logprobs` asks for them: of every prompt token (output
    tokens that the grant carried left out) but the first."""
    checksums: tuple[SliceChecksums, ...] = ()
    """When COMPLETE, with `--kv-checksum`: of all that was written, taken at its source."""


DecodeToPrefill = Hello | Grant | Revoke
PrefillToDecode = Welcome | FirstToken | Drained
