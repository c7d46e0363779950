"""Choices of /v1/chat/completions. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from pdrt.gateway.chat.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    merged,
)
from pdrt.gateway.chat.output import OutputParser
from pdrt.gateway.logprobs import LogprobsFormat, Scored, TokenNames, prompt_logprobs
from pdrt.gateway.responses import (
    ChunkUsage,
    Head,
    Piece,
    PlainEvents,
    PromptShown,
    WholeChoice,
    encoder,
    event,
)
from pdrt.gateway.schema.answers import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishedBy,
    ToolCall,
    ToolCallDelta,
)
from pdrt.gateway.schema.generation import Shown


class ChatWhole(WholeChoice):
    """One choice, as a JSON object at its end."""

    def __init__(
        self, index: int, shown: Shown, names: TokenNames, parser: OutputParser | None
    ) -> None:
        """`parser` None: all of the output is content."""
        super().__init__(index, shown, names)
        self._parser = parser

    def encode(self) -> bytes:
        deltas = _deltas(self._parser, self._text(), is_last=True)
        message = _message(deltas, self._shown.reasoning)
        assert self._finish_reason is not None
        return encoder.encode(
            ChatChoice(
                self._index,
                message,
                chat_logprobs(self._shown, self._names, self._scored()),
                _finished_by(self._finish_reason, message.tool_calls is not UNSET),
                self._token_ids(),
            )
        )

    def of_prompt(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        top, logprobs = self._shown.prompt_logprobs, self._prompt.logprobs
        if top is not None and logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt_ids, logprobs, top, self._names)
        if self._prompt.token_ids is not UNSET:
            fields["prompt_token_ids"] = self._prompt.token_ids
        return fields


class ChatEvents:
    """One choice, as events of a stream."""

    def __init__(
        self,
        head: Head,
        index: int,
        shown: Shown,
        names: TokenNames,
        parser: OutputParser | None,
    ) -> None:
        self._head = head
        self._index = index
        self._shown = shown
        self._names = names
        self._parser = parser
        self._prompt: PromptShown | None = None
        """What the first event, of the role, shows of it; None when that was sent."""
        self._has_calls = False
        self._is_plain = parser is None and not shown.token_ids
        self._plain: PlainEvents | None = None

    def begin(self, prompt: PromptShown) -> None:
        self._prompt = prompt

    def push(self, piece: Piece, usage: ChunkUsage) -> bytes:
        # What most events are.
        if self._is_plain and self._prompt is None and piece.text and not piece.scored:
            if self._plain is None or self._plain.usage != usage:
                choice = ChatChunkChoice(self._index, ChatDelta(content=""))
                self._plain = PlainEvents(self._chunk(choice, usage), b'"content":', usage)
            return self._plain.encode(piece.text)
        return self._events(piece, usage, is_last=False)

    def finish(self, piece: Piece, finish_reason: FinishedBy, usage: ChunkUsage) -> bytes:
        events = self._events(piece, usage, is_last=True)
        reason = _finished_by(finish_reason, self._has_calls)
        choice = ChatChunkChoice(self._index, ChatDelta(), finish_reason=reason)
        return events + self._chunk(choice, usage)

    def _events(self, piece: Piece, usage: ChunkUsage, is_last: bool) -> bytes:
        events = b"" if self._prompt is None else self._role(usage)
        deltas: list[ChatDelta] = []
        for part in _deltas(self._parser, piece.text, is_last):
            self._has_calls = self._has_calls or isinstance(part, ToolCallStart)
            if self._shown.reasoning or not isinstance(part, Reasoning):
                deltas.append(_chat_delta(part))
        shown = self._shown
        if not deltas and (piece.scored or (shown.token_ids and piece.token_ids)):
            deltas = [ChatDelta(content="")]
        for number, delta in enumerate(deltas):
            logprobs = chat_logprobs(shown, self._names, piece.scored) if piece.scored else None
            token_ids = piece.token_ids if shown.token_ids else UNSET
            # Together with the first of the deltas, each once.
            choice = (
                ChatChunkChoice(self._index, delta)
                if number
                else ChatChunkChoice(self._index, delta, logprobs, None, token_ids)
            )
            events += self._chunk(choice, usage)
        return events

    def _role(self, usage: ChunkUsage) -> bytes:
        assert self._prompt is not None
        prompt, self._prompt = self._prompt, None
        choice = ChatChunkChoice(self._index, ChatDelta("assistant", ""))
        return self._chunk(choice, usage, prompt)

    def _chunk(
        self, choice: ChatChunkChoice, usage: ChunkUsage, prompt: PromptShown | None = None
    ) -> bytes:
        head = self._head
        token_ids = UNSET if prompt is None else prompt.token_ids
        return event(
            ChatChunk(
                head.id,
                "chat.completion.chunk",
                head.created,
                head.model,
                [choice],
                usage,
                token_ids,
            )
        )


def _deltas(parser: OutputParser | None, text: str, is_last: bool) -> list[Delta]:
    if parser is None:
        return [Content(text)] if text else []
    deltas = parser.push(text) if text else []
    return merged([*deltas, *parser.finish()] if is_last else deltas)


def _chat_delta(delta: Delta) -> ChatDelta:
    match delta:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case ToolCallStart(index, id, name):
            call = ToolCallDelta(index, CalledFunctionDelta("", name), id, "function")
            return ChatDelta(tool_calls=[call])
        case ToolCallArguments(index, json_text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, CalledFunctionDelta(json_text))])


def _message(deltas: Sequence[Delta], shows_reasoning: bool) -> ChatMessage:
    content = "".join([d.text for d in deltas if isinstance(d, Content)])
    reasoning = "".join([d.text for d in deltas if isinstance(d, Reasoning)])
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            arguments[delta.index].append(delta.json_text)
    calls = [
        ToolCall(d.id, "function", CalledFunction(d.name, "".join(arguments[d.index])))
        for d in deltas
        if isinstance(d, ToolCallStart)
    ]
    return ChatMessage(
        "assistant",
        content if content or not calls else None,
        reasoning_content=reasoning if reasoning and shows_reasoning else UNSET,
        tool_calls=calls or UNSET,
    )


def _finished_by(reason: FinishedBy, has_calls: bool) -> FinishedBy:
    return "tool_calls" if has_calls and reason == "stop" else reason


def chat_logprobs(shown: Shown, names: TokenNames, scored: Sequence[Scored]) -> ChatLogprobs | None:
    if shown.logprobs is None:
        return None
    return LogprobsFormat(names, shown.logprobs, shown.tokens_as_ids).chat(scored)
