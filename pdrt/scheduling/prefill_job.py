"""One room's prompt on its way through the model, and parts of it. Pure."""

from __future__ import annotations

import msgspec

from pdrt.ids import RoomId
from pdrt.kv.layout import KvLayout
from pdrt.kv.pages import Owner, OwnerKind
from pdrt.kv.prefix import page_keys
from pdrt.protocol.messages import Grant


class Chunk(msgspec.Struct, frozen=True):
    """Part of a step: tokens `[start, end)` of one room's prompt."""

    room: RoomId
    start: int
    end: int
    is_last: bool


class PrefillJob:
    """One room's prompt on its way through the model."""

    def __init__(
        self, grant: Grant, layout: KvLayout, queued_at: float, *, is_caching: bool
    ) -> None:
        self.room = grant.room
        self.owner = Owner(OwnerKind.ROOM, grant.room)
        self.grant = grant
        self.length = len(grant.token_ids)
        self.page_count = layout.pages_for(self.length)
        keys = page_keys(grant.token_ids, layout.page_size, grant.cache_salt) if is_caching else []
        self.keys = keys
        """Of the full pages; none without a cache."""
        self.findable = min(len(keys), (self.length - 1) // layout.page_size)
        """How many of these may be taken from the cache: the last token is always computed."""
        self.queued_at = queued_at
        self.started_at: float | None = None
        """When the first chunk was planned."""
        self.computed_at: float | None = None
        """When the last chunk was done."""
        self.pages: list[int] = []
        """Source pages of the whole prompt, cached ones that it holds first; empty until it
        starts. Those below `computed` never change."""
        self.spare: list[int] = []
        """Pages that it took for what another room computed in the meantime."""
        self.computed = 0
        """Tokens whose KV is in the pool."""
        self.cached = 0
        """Of these, tokens that were found in the cache. Until it starts `computed` is 0, and
        this is what could be found when it was last looked at."""
        self.is_blocked = False
        """Its last token waits: what it may be sampled from is not known yet."""
        self.overtaken = 0
        """Rooms that started while this one, older than they, waited for pages."""

    @property
    def has_started(self) -> bool:
        return bool(self.pages)

    @property
    def found(self) -> int:
        """Tokens whose KV it did not compute but found."""
        return self.cached if self.has_started else 0

    @property
    def is_sampled(self) -> bool:
        """The token after the prompt is wanted."""
        return self.grant.sampling.max_tokens > self.grant.output_tokens

    @property
    def is_scored(self) -> bool:
        """Log probabilities of the prompt are wanted: all of it must be computed."""
        return self.grant.sampling.prompt_logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the client gave, output that the grant carries left out."""
        return self.length - self.grant.output_tokens

    @property
    def position(self) -> int:
        """Where computing goes on, or would begin."""
        return self.computed if self.has_started else self.cached

    @property
    def end(self) -> int:
        """How far it may be computed now."""
        return self.length - 1 if self.is_blocked else self.length

    @property
    def remaining(self) -> int:
        """Tokens that can be computed now."""
        return self.end - self.position

    def unscored(self, start: int) -> int:
        """Log probabilities still to be computed from the token at `start` on: each token gives
        those of the next one."""
        return max(0, self.prompt_tokens - 1 - start) if self.is_scored else 0
