"""What all OpenAI answers have in common: head, usage, events of a stream. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from pdrt.gateway.errors import ApiError
from pdrt.gateway.logprobs import Scored, TokenNames
from pdrt.gateway.schema.answers import FinishedBy, PromptTokensDetails, UsageBody
from pdrt.gateway.schema.generation import Shown
from pdrt.sampling import TokenLogprobs

DONE = b"data: [DONE]\n\n"

encoder = msgspec.json.Encoder()


class Usage(msgspec.Struct, frozen=True):
    """Exact token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> UsageBody:
        return UsageBody(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            PromptTokensDetails(self.cached_tokens),
        )


class Piece(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Of the output."""
    scored: Sequence[Scored] = ()
    """Tokens that the text came from, of the prompt too where it is a part of the text; empty
    where nobody asked."""


class PromptShown(msgspec.Struct, frozen=True):
    """What an answer shows of a prompt beside its text."""

    token_ids: tuple[int, ...] | UnsetType = UNSET
    logprobs: tuple[TokenLogprobs, ...] | None = None


ChunkUsage = UsageBody | UnsetType | None


class Renderer(Protocol):
    """Turns what is new of one choice into bytes: events at once, or one JSON object at the end."""

    def begin(self, prompt: PromptShown) -> None:
        """Once, before anything else."""

    def push(self, piece: Piece, usage: ChunkUsage) -> bytes: ...

    def finish(self, piece: Piece, finish_reason: FinishedBy, usage: ChunkUsage) -> bytes: ...


class WholeChoice(ABC):
    """A `Renderer` that keeps what comes, and is one JSON object at the end."""

    def __init__(self, index: int, shown: Shown, names: TokenNames) -> None:
        self._index = index
        self._shown = shown
        self._names = names
        self._prompt = PromptShown()
        self._pieces: list[Piece] = []
        self._finish_reason: FinishedBy | None = None

    def begin(self, prompt: PromptShown) -> None:
        self._prompt = prompt

    def push(self, piece: Piece, usage: ChunkUsage) -> bytes:
        self._pieces.append(piece)
        return b""

    def finish(self, piece: Piece, finish_reason: FinishedBy, usage: ChunkUsage) -> bytes:
        self._pieces.append(piece)
        self._finish_reason = finish_reason
        return b""

    @abstractmethod
    def encode(self) -> bytes:
        """The choice, after its end."""

    def of_prompt(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """What the response shows of the prompt, beside the choices."""
        return {}

    def _text(self) -> str:
        return "".join([piece.text for piece in self._pieces])

    def _scored(self) -> list[Scored]:
        return [one for piece in self._pieces for one in piece.scored]

    def _token_ids(self) -> tuple[int, ...] | UnsetType:
        if not self._shown.token_ids:
            return UNSET
        return tuple(token for piece in self._pieces for token in piece.token_ids)


class Head(msgspec.Struct, frozen=True):
    """What every body and event of a response begins with."""

    id: str
    created: int
    model: str
    is_chat: bool

    def whole(self, choices: Sequence[bytes], usage: Usage, rest: dict[str, Any]) -> bytes:
        """The response in one piece; `choices` are encoded already."""
        return encoder.encode(
            {
                **self._fields("chat.completion" if self.is_chat else "text_completion"),
                "choices": [msgspec.Raw(choice) for choice in choices],
                "usage": usage.body(),
                **rest,
            }
        )

    def usage_event(self, usage: Usage) -> bytes:
        """The last event but one, where the client wants it."""
        fields = self._fields("chat.completion.chunk" if self.is_chat else "text_completion")
        return event({**fields, "choices": [], "usage": usage.body()})

    def _fields(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}


def event(chunk: object) -> bytes:
    return b"data: " + encoder.encode(chunk) + b"\n\n"


class PlainEvents:
    """Events that differ in a text only: what is around it is encoded once.

    Attributes:
        usage: what they say of it.
    """

    def __init__(self, without_text: bytes, key: bytes, usage: ChunkUsage) -> None:
        """`without_text`: such an event, whose text is the empty string behind `key`."""
        # Quotes within strings are escaped: nothing that a client named can look like this.
        self._before, mark, self._after = without_text.partition(key + b'""')
        assert mark, without_text
        self._before += key
        self.usage = usage

    def encode(self, text: str) -> bytes:
        return self._before + encoder.encode(text) + self._after


def error_event(error: ApiError) -> bytes:
    """Ends a stream that had begun: no `[DONE]`, no finish reason."""
    return b"event: error\ndata: " + error.body + b"\n\n"
