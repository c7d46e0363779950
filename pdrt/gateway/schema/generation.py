"""A validated request, but for what depends on the model. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.gateway.chat.bodies import Tool, ToolChoice
from pdrt.sampling import Grammar, Sampling


class ChatPrompt(msgspec.Struct, frozen=True):
    """A prompt for the chat template."""

    messages: tuple[dict[str, Any], ...]
    """As templates want them."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = ChatPrompt | str | tuple[int, ...]


class Encoding(msgspec.Struct, frozen=True):
    """How prompts become token ids."""

    add_special_tokens: bool
    truncate: int | None = None
    """Tokens kept of a prompt, its last ones; None: all, -1: as many as fit."""


class Shown(msgspec.Struct, frozen=True):
    """What the answer shows."""

    echo: bool = False
    """The prompt comes before the output."""
    logprobs: int | None = None
    """Of output tokens (and echoed ones), and that many of the most likely."""
    prompt_logprobs: int | None = None
    """Of the prompt, in the field of that name."""
    skip_special_tokens: bool = True
    stop_string: bool = False
    """The stop string or the token that ended the output is a part of it."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """A token's string in log probabilities is `token_id:ID`."""
    reasoning: bool = True


class Streaming(msgspec.Struct, frozen=True):
    include_usage: bool
    continuous_usage: bool


class Generation(msgspec.Struct, frozen=True):
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int
    """Choices of each prompt."""
    encoding: Encoding
    max_tokens: int | None
    """None: as many as the context holds."""
    max_tokens_param: str
    """The field that said so, for messages."""
    sampling: Sampling
    """All but `max_tokens`, `seed` and the grammar."""
    seed: int | None
    stops: tuple[str, ...]
    shown: Shown
    response_grammar: Grammar | None
    """Of the answer; with tools or reasoning it is a part of the output's."""
    response_param: str
    """The field that it comes from, for messages."""
    cache_salt: str
    streaming: Streaming | None
    """None: the answer comes in one piece."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
