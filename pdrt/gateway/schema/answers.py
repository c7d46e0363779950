"""The fields of answers, as types. What is `UNSET` is left out. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishedBy = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct, frozen=True):
    """vLLM's."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By position, then by token id; null for the first token."""


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, an item per token."""

    text_offset: list[int]
    """Where in `text` the token begins; one that ends a character begins where that does."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """A completion in one piece; as an event of a stream too, without `usage` or with a null one
    until the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class LikelyToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class CalledFunctionDelta(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


class HealthAnswer(Struct, frozen=True):
    status: Literal["ok"]


class ReadyAnswer(Struct, frozen=True):
    ready: bool
    reasons: list[str]
    """Why not, in words."""


class VersionAnswer(Struct, frozen=True):
    version: str


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    error: ErrorDetail


class ModelCard(Struct, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]
