"""What gateways and workers say to each other: one union per direction.

Each worker's leader connects one DEALER, whose routing id is its incarnation, to every gateway
it is given. Tokens are indexed over the whole request: a duplicate is dropped, a gap ends the
attempt.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from pdrt.context import RequestContext
from pdrt.ids import Incarnation, RequestId
from pdrt.protocol.messages import Fingerprint, Load, Natural, Seconds
from pdrt.sampling import Sampling, TokenId, TokenLogprobs


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """How an attempt at a request ended on the decode worker."""

    STOP = "stop"
    """End-of-sequence or a stop token id."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    """The gateway said so."""
    REJECTED = "rejected"
    """Cannot be served (the client's fault): HTTP 400."""
    OVERLOADED = "overloaded"
    """Queue or pools are full: HTTP 429."""
    DEADLINE = "deadline"
    FAILED = "failed"
    """Rooms used up or a worker's error: HTTP 500."""
    UNAVAILABLE = "unavailable"
    """No prefill worker can be reached, or this worker is leaving: another attempt may help."""


class Usage(msgspec.Struct, frozen=True):
    """Exact counts, of the whole request."""

    prompt_tokens: Natural
    output_tokens: Natural
    cached_tokens: Natural = 0


# Worker -> gateway


class Register(msgspec.Struct, frozen=True, tag=True):
    """Registration and heartbeat; also sent at once when something that it says changes."""

    role: Role
    worker: Incarnation
    seq: int
    """Counts up within an incarnation; an older one is dropped."""
    endpoint: str | None
    """Bootstrap channel of a prefill worker, `tcp://HOST:PORT`; None for decode."""
    fingerprint: Fingerprint
    max_model_len: Natural
    requests_max: Natural
    """Requests this worker takes before it answers OVERLOADED."""
    version: str
    metrics: str | None = None
    """URL of the worker's own /metrics."""
    healthy: bool = True
    reasons: tuple[str, ...] = ()
    """Why it is not healthy, in words."""
    hangs: bool = False
    """A forward does not return: nothing that it has will get on, for all anybody knows."""
    draining: bool = False
    """Takes no new requests, finishes those it has."""
    paired: tuple[str, ...] = ()
    """Decode: endpoints of the prefill workers it can send a Grant to right now."""
    refused: tuple[str, ...] = ()
    """Decode: prefill workers it could not be paired with, each with both sides' values."""
    load: Load = Load()
    local_prefill: bool = False
    """Decode: it computes prompts itself when it is paired with nobody."""


class Tokens(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Output tokens of one request, from `first_index` on (0: the first output token)."""

    request: RequestId
    worker: Incarnation
    first_index: Natural
    token_ids: tuple[TokenId, ...]
    cached_tokens: Natural | None = None
    """Of the prompt, found in a prefix cache; said with the first token at least. A stream that
    ends at a stop string has its usage from here, as no `Finished` is waited for."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where `Sampling.logprobs` asks for them; else empty."""
    prefill: Incarnation | None = None
    """Who computed the prompt; said with the first token."""


class StepTokens(msgspec.Struct, frozen=True, tag=True):
    """What one step yielded for requests of one gateway: their `Tokens`, in one frame."""

    worker: Incarnation
    tokens: tuple[Tokens, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Of every prompt token but the first, once per attempt whose `Sampling.prompt_logprobs` asks
    for them, and before its `Finished`."""

    request: RequestId
    worker: Incarnation
    logprobs: tuple[TokenLogprobs, ...]
    cached_tokens: Natural = 0
    prefill: Incarnation | None = None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The end of an attempt; `Cancel` is resent until it arrives."""

    request: RequestId
    worker: Incarnation
    reason: FinishReason
    usage: Usage | None = None
    detail: str = ""
    """Words for a person, when `reason` is an error."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A worker's last word: it ends, and nobody needs to wait for its silence."""

    worker: Incarnation


class Report(msgspec.Struct, frozen=True, tag=True):
    """Answers an `Inspect`."""

    worker: Incarnation
    serial: int
    metrics: bytes = b""
    """Prometheus text."""
    status: bytes = b""
    """JSON object, as /status shows it."""
    broken: tuple[str, ...] = ()
    """Invariants found broken; empty when all hold."""


# Gateway -> worker


class Registered(msgspec.Struct, frozen=True, tag=True):
    """Answers each `Register`, again when prefill workers come or go; the gateway's heartbeat."""

    gateway: Incarnation
    worker: Incarnation
    seq: int
    """Of the `Register` that it answers."""
    prefill_endpoints: tuple[str, ...] = ()
    """To a decode worker: the live prefill workers of the same fingerprint."""
    refusal: str | None = None
    """Why this worker is not accepted (table full, protocol version), in words."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One attempt at a request, to a decode worker."""

    request: RequestId
    worker: Incarnation
    token_ids: tuple[Natural, ...]
    """Prompt."""
    output_token_ids: tuple[Natural, ...]
    """Output already streamed by earlier attempts."""
    sampling: Sampling
    seconds_max: Seconds
    """Counted from receipt."""
    prefill_endpoints: tuple[str, ...]
    """In order of preference."""
    cache_salt: str = ""
    """Prefixes are shared between requests of the same salt only."""
    context: RequestContext = RequestContext()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Resent until `Finished`."""

    request: RequestId
    worker: Incarnation
    reason: str


class Credit(msgspec.Struct, frozen=True, tag=True):
    """How many output tokens the client has taken so far, counted over the whole request."""

    request: RequestId
    worker: Incarnation
    tokens_taken: Natural


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks for metrics and state; with `check`, also runs the check of all invariants."""

    worker: Incarnation
    serial: int
    gateway: Incarnation
    check: bool = False


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, finish those you have, and leave: as SIGTERM does. Idempotent."""

    worker: Incarnation
    gateway: Incarnation


WorkerToGateway = Register | Tokens | StepTokens | PromptLogprobs | Finished | Report | Gone
GatewayToWorker = Registered | Submit | Cancel | Credit | Inspect | Drain
