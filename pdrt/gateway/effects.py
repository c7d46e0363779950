"""What a client asks for, and what the gateway's pure core wants done about it. Pure."""

from __future__ import annotations

import msgspec

from pdrt.context import RequestContext
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import Cancel, Credit, FinishReason, Submit
from pdrt.sampling import Sampling, TokenLogprobs


class Submission(msgspec.Struct, frozen=True):
    """What a client asks for, validated and tokenized."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline: float
    end_token_ids: frozenset[int]
    """Tokens that end the output by themselves; empty when the client ignores them."""
    cache_salt: str = ""
    context: RequestContext = RequestContext()

    def is_end(self, token: int, position: int) -> bool:
        """Whether `token`, as output token number `position` (from 0), ends the output."""
        return token in self.end_token_ids and position >= self.sampling.min_tokens

    def is_complete(self, output: list[int]) -> FinishReason | None:
        """How `output` ended, should it hold all there is to generate."""
        if output and self.is_end(output[-1], len(output) - 1):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.sampling.max_tokens else None


class Send(msgspec.Struct, frozen=True):
    """To the worker that the message names. A refused `Submit` comes back as `on_undelivered`;
    anything else is resent."""

    message: Submit | Cancel | Credit


class Assigned(msgspec.Struct, frozen=True):
    """The request has an attempt at `decode` now."""

    serial: int
    decode: Incarnation
    recomputed_tokens: int
    """Tokens that an earlier attempt computed already; 0 for the first attempt."""


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """New output tokens, in order, each exactly once."""

    serial: int
    token_ids: tuple[int, ...]
    cached_tokens: int
    """Of the prompt, as far as it is known by now."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, where they are asked for."""
    prefill: Incarnation | None = None
    """Who computed the prompt, where the message says so."""


class DeliverPrompt(msgspec.Struct, frozen=True):
    """What the client asked to learn of its prompt; once, before any output."""

    serial: int
    logprobs: tuple[TokenLogprobs, ...]
    """Of every prompt token but the first."""
    cached_tokens: int
    prefill: Incarnation | None


class Ended(msgspec.Struct, frozen=True):
    """The last effect of a request, unless its client abandoned it."""

    serial: int
    reason: FinishReason
    detail: str = ""
    cached_tokens: int = 0


Effect = Send | Assigned | Deliver | DeliverPrompt | Ended
