"""Choices of /v1/completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from pdrt.gateway.logprobs import LogprobsFormat, Scored, TokenNames, prompt_logprobs
from pdrt.gateway.responses import ChunkUsage, Head, Piece, PromptShown, WholeChoice, encoder, event
from pdrt.gateway.schema.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishedBy,
)
from pdrt.gateway.schema.generation import Shown


class CompletionWhole(WholeChoice):
    """One choice, as a JSON object at its end."""

    def __init__(self, index: int, shown: Shown, names: TokenNames, prompt: Sequence[int]) -> None:
        super().__init__(index, shown, names)
        self._prompt_ids = prompt

    def encode(self) -> bytes:
        top, of_prompt = self._shown.prompt_logprobs, self._prompt.logprobs
        return encoder.encode(
            CompletionChoice(
                self._index,
                self._text(),
                completion_logprobs(self._shown, self._names, self._scored()),
                self._finish_reason,
                UNSET
                if top is None or of_prompt is None
                else prompt_logprobs(self._prompt_ids, of_prompt, top, self._names),
                self._prompt.token_ids,
                self._token_ids(),
            )
        )


class CompletionEvents:
    """One choice, as events of a stream."""

    def __init__(self, head: Head, index: int, shown: Shown, names: TokenNames) -> None:
        self._head = head
        self._index = index
        self._shown = shown
        self._names = names
        self._prompt = PromptShown()
        """What the first event shows of it."""

    def begin(self, prompt: PromptShown) -> None:
        self._prompt = prompt

    def push(self, piece: Piece, usage: ChunkUsage) -> bytes:
        is_empty = not piece.text and not piece.scored
        if is_empty and not (self._shown.token_ids and piece.token_ids):
            return b""
        return self._event(piece, None, usage)

    def finish(self, piece: Piece, finish_reason: FinishedBy, usage: ChunkUsage) -> bytes:
        return self.push(piece, usage) + self._event(Piece(), finish_reason, usage)

    def _event(self, piece: Piece, finish_reason: FinishedBy | None, usage: ChunkUsage) -> bytes:
        head, prompt, self._prompt = self._head, self._prompt, PromptShown()
        choice = CompletionChoice(
            self._index,
            piece.text,
            completion_logprobs(self._shown, self._names, piece.scored) if piece.scored else None,
            finish_reason,
            UNSET,
            prompt.token_ids,
            piece.token_ids if self._shown.token_ids else UNSET,
        )
        return event(
            Completion(head.id, "text_completion", head.created, head.model, [choice], usage)
        )


def completion_logprobs(
    shown: Shown, names: TokenNames, scored: Sequence[Scored]
) -> CompletionLogprobs | None:
    if shown.logprobs is None:
        return None
    return LogprobsFormat(names, shown.logprobs, shown.tokens_as_ids).completion(scored)
