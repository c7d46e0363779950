"""One client's request, as the core keeps it. Pure."""

from __future__ import annotations

import msgspec

from pdrt.gateway.attempts import Attempt
from pdrt.gateway.effects import Deliver, Submission
from pdrt.gateway.prefix_index import Prompt
from pdrt.ids import Incarnation
from pdrt.protocol.gateway_messages import FinishReason, Usage
from pdrt.sampling import Sampling


class Failure(msgspec.Struct, frozen=True):
    """Why an attempt ended, or none could begin; what the client is told if no other follows."""

    reason: FinishReason
    detail: str


class RequestState(msgspec.Struct):
    submission: Submission
    prompt: Prompt
    lacks_prompt_logprobs: bool
    """They are asked for and have not come: nothing is delivered while it is so."""
    output: list[int] = []
    """Tokens received; never more than `max_tokens`. Delivered, but for those in `held`."""
    held: list[Deliver] = []
    """Held back while the prompt's log probabilities are missing; together they are `output`."""
    taken: int = 0
    """Of those, taken by the client."""
    attempt: Attempt | None = None
    """The only one whose tokens count; None only while the next is being chosen or waited for."""
    waiting: Failure | None = None
    """Set exactly while there is no attempt because nobody can serve it: how it ends if nobody
    comes who can."""
    waits_since: float | None = None
    """When it first had to wait, since its last token. None if it has not."""
    was_lost: bool = False
    """A worker that had it was lost, or hangs."""
    attempts: int = 0
    handed_on: int = 0
    """Of those, the ones that a worker gave up in good order, as it left, or never had. They bound
    themselves: none of these workers is asked again, unless it could not be reached, and then not
    before the request has waited."""
    tried: set[Incarnation] = set()
    refused: set[Incarnation] = set()
    unreached: set[Incarnation] = set()
    """Its `Submit` could not be sent to them, since the request waited last."""
    cached_tokens: int = 0

    @property
    def cached(self) -> int:
        """Tokens of the client's prompt that were found in a cache."""
        # A later attempt's prompt holds output too, which is no part of the client's.
        return min(self.cached_tokens, len(self.submission.token_ids))

    def sampling(self) -> Sampling:
        """What is still to be asked for."""
        sampling = self.submission.sampling
        if sampling.prompt_logprobs is None or self.lacks_prompt_logprobs:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)

    @property
    def has_begun(self) -> bool:
        """Its client has more to lose than one that is turned away at the door: it may wait."""
        return self.was_lost or bool(self.output)

    def missing(self, usage: Usage | None) -> str | None:
        """What a good end with this usage should have come after, in words."""
        if self.lacks_prompt_logprobs:
            return "the log probabilities of the prompt are missing"
        if usage is None:
            return None
        # Prefill samples a token even when none is wanted: it is no part of the output.
        tokens = min(usage.output_tokens, self.submission.sampling.max_tokens)
        missing = tokens - len(self.output)
        return f"the last {missing} tokens are missing" if missing > 0 else None

    def give_up_held(self) -> None:
        """Nobody has seen it: the next attempt begins anew."""
        if self.held:
            self.output, self.held = [], []

    def check_invariants(self, serial: int) -> None:
        """Raises AssertionError when the fields contradict each other."""
        assert (self.attempt is None) == (self.waiting is not None)
        assert self.attempt is None or self.attempt.id.serial == serial
        held = [token for deliver in self.held for token in deliver.token_ids]
        assert held == (self.output if self.lacks_prompt_logprobs else [])
        assert self.taken <= len(self.output) - len(held)
        assert len(self.output) <= self.submission.sampling.max_tokens
