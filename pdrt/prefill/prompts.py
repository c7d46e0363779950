"""What rooms ask of the model besides KV: their rows, grammars, and prompt log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.ids import RoomId
from pdrt.model.batch import Matcher, Row
from pdrt.protocol.messages import Grant
from pdrt.sampling import Grammar, TokenLogprobs
from pdrt.scheduling.prefill_job import Chunk, PrefillJob


def grammar_of(grant: Grant) -> Grammar | None:
    """What the token that this room samples must follow; None also where it samples none."""
    sampling = grant.sampling
    return sampling.grammar if sampling.max_tokens > grant.output_tokens else None


class Prompts:
    """By room, until it is forgotten: its grammar's matcher, and what is known of the log
    probabilities of its prompt."""

    def __init__(self) -> None:
        self._matchers: dict[RoomId, Matcher] = {}
        self._scores: dict[RoomId, list[TokenLogprobs]] = {}

    def set_matcher(self, room: RoomId, matcher: Matcher) -> None:
        self._matchers[room] = matcher

    def failure(self, room: RoomId) -> str | None:
        """Why the token that a step has sampled is not one of its grammar, if so."""
        matcher = self._matchers.get(room)
        return None if matcher is None else matcher.failure

    def row(self, job: PrefillJob, chunk: Chunk) -> Row:
        """One room's part of a step."""
        grant = job.grant
        sampling = grant.sampling if chunk.is_last and job.is_sampled else None
        has_history = sampling is not None and sampling.needs_history
        scored_end = min(chunk.end + 1, job.prompt_tokens) if job.is_scored else 0
        return Row(
            token_ids=grant.token_ids[chunk.start : chunk.end],
            start=chunk.start,
            pages=job.pages,
            sampling=sampling,
            output_tokens=grant.output_tokens,
            history=grant.token_ids if has_history else (),
            matcher=self._matchers[job.room] if grammar_of(grant) and sampling else None,
            scored=grant.token_ids[chunk.start + 1 : scored_end],
            scored_top=grant.sampling.prompt_logprobs or 0,
        )

    def add_scores(self, room: RoomId, scores: Sequence[TokenLogprobs]) -> None:
        """Of the prompt's next tokens."""
        if scores:
            self._scores.setdefault(room, []).extend(scores)

    def scores(self, room: RoomId) -> tuple[TokenLogprobs, ...]:
        """Of every prompt token but the first, once the prompt is computed; none where none are
        wanted."""
        return tuple(self._scores.get(room, ()))

    def forget(self, room: RoomId) -> None:
        self._matchers.pop(room, None)
        self._scores.pop(room, None)
