"""From a validated request to token ids and a grammar: what depends on the model. Pure but for
the tokenizer; works on large prompts for a while, so it may run beside the loop."""

from __future__ import annotations

import msgspec

from pdrt.config import ApiConfig
from pdrt.errors import RequestRefused
from pdrt.gateway.chat.grammar import output_grammar
from pdrt.gateway.chat.output import special_markers
from pdrt.gateway.chat.styles import (
    ReasoningStart,
    reasoning_start,
    reasoning_style,
    tool_style,
)
from pdrt.gateway.chat.tools import ToolPlan, ToolSupport, plan_tools
from pdrt.gateway.errors import context_length_exceeded, invalid
from pdrt.gateway.schema.bounds import Limits
from pdrt.gateway.schema.generation import ChatPrompt, Encoding, Generation, Prompt
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import Grammar

CHARACTERS_PER_MESSAGE = 16
"""What the chat template adds to each, or more: an empty message is work too."""
CHARACTERS_PER_TOKEN_MAX = 256
"""No vocabulary known to us has longer tokens, but for rulers and blanks. A text that is longer
than the context even so is refused unread: tokenizing it would keep the thread for minutes."""

CHARACTERS_PER_TOKEN = 8
"""More than most texts have."""
CUT_TOKENS_MAX = 4 * CHARACTERS_PER_TOKEN_MAX
"""What the end of a text may have more of for being cut within a token: one for each byte."""


class EncodedPrompt(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    """At least one."""
    text: str
    """As it is echoed; empty where it is not."""


class Prepared(msgspec.Struct, frozen=True):
    """A request, but for its fit into the context."""

    generation: Generation
    prompts: tuple[EncodedPrompt, ...]
    grammar: Grammar | None
    """Of the whole output."""
    grammar_param: str
    """The field that it comes from, for messages."""
    tools: ToolPlan
    start: ReasoningStart

    @property
    def is_plain(self) -> bool:
        """All of the output is content: there is nothing to look for in it."""
        return self.tools.style is None and self.start is ReasoningStart.OVER

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that must show in the text."""
        return () if self.is_plain else special_markers(self.tools, self.start)


class Preparation:
    """How requests are prepared for one model."""

    def __init__(self, identity: ModelIdentity, tokenizer: Tokenizer, api: ApiConfig) -> None:
        self._vocab_size = identity.vocab_size
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._reasoning = reasoning_style(api.reasoning_parser, template.text)
        self._tools = ToolSupport(
            tool_style(api.tool_call_parser, template.text),
            template.renders_tools,
            api.grammar_bytes_max,
        )

    def prepare(self, generation: Generation, limits: Limits) -> Prepared:
        """Raises ApiError naming the field."""
        tools, start = ToolPlan(), ReasoningStart.OVER
        (prompt, *others) = generation.prompts
        if isinstance(prompt, ChatPrompt):
            assert not others
            tools = plan_tools(
                prompt.tools, prompt.tool_choice, prompt.parallel_tool_calls, self._tools
            )
            text = self._render(prompt, tools, limits)
            continued = None
            if prompt.continue_final_message:
                continued = prompt.messages[-1]["content"]
            start = reasoning_start(self._reasoning, text, continued)
            encoded = [self._encode_text(text, generation, "messages", limits)]
        else:
            encoded = [self._encode(p, generation, limits) for p in generation.prompts]
        response = generation.response_grammar
        return Prepared(
            generation,
            tuple(encoded),
            output_grammar(response, tools, start, limits.grammar_bytes_max),
            "tools" if response is None else generation.response_param,
            tools,
            start,
        )

    def tokenize(self, prompt: Prompt, encoding: Encoding, limits: Limits) -> tuple[int, ...]:
        """Raises ApiError naming the field."""
        assert not isinstance(prompt, tuple)
        if isinstance(prompt, ChatPrompt):
            tools = plan_tools(prompt.tools, None, None, self._tools)
            text = self._render(prompt, tools, limits)
            return self._encode_within(text, encoding.add_special_tokens, "messages", limits)
        return self._encode_within(prompt, encoding.add_special_tokens, "prompt", limits)

    def _render(self, prompt: ChatPrompt, tools: ToolPlan, limits: Limits) -> str:
        size = sum(
            CHARACTERS_PER_MESSAGE + len(message["content"]) + len(message.get("name", ""))
            for message in prompt.messages
        )
        _check_characters(size, "messages", limits)
        try:
            return self._tokenizer.render_chat(
                prompt.messages,
                tools.rendered,
                prompt.add_generation_prompt,
                prompt.continue_final_message,
                prompt.template_kwargs,
            )
        except RequestRefused as error:
            raise invalid(str(error), error.param or "messages") from None

    def _encode(
        self, prompt: str | tuple[int, ...] | ChatPrompt, generation: Generation, limits: Limits
    ) -> EncodedPrompt:
        assert not isinstance(prompt, ChatPrompt)
        if isinstance(prompt, str):
            return self._encode_text(prompt, generation, "prompt", limits)
        if not (min(prompt) >= 0 and max(prompt) < self._vocab_size):
            raise invalid(f"Token ids must be from 0 to {self._vocab_size - 1}", "prompt")
        return self._encoded(_truncated(prompt, generation, limits), None, generation)

    def _encode_text(
        self, text: str, generation: Generation, param: str, limits: Limits
    ) -> EncodedPrompt:
        if generation.encoding.truncate is None:
            self._check_beginnings(text, param, limits)
        token_ids = self._encode_within(text, generation.encoding.add_special_tokens, param, limits)
        if not token_ids:
            raise invalid("The prompt must hold at least one token", param)
        kept = _truncated(token_ids, generation, limits)
        return self._encoded(kept, text if kept == token_ids else None, generation)

    def _encode_within(
        self, text: str, add_special_tokens: bool, param: str, limits: Limits
    ) -> tuple[int, ...]:
        _check_characters(len(text), param, limits)
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_beginnings(self, text: str, param: str, limits: Limits) -> None:
        """Refuse a text that is far too long by a part of it: all of it may take seconds, and
        others wait for the thread."""
        size = limits.tokens_max * CHARACTERS_PER_TOKEN
        while size < len(text):
            tokens = len(self._tokenizer.encode(text[:size], add_special_tokens=False))
            if tokens > limits.tokens_max + CUT_TOKENS_MAX:
                raise context_length_exceeded(f"over {tokens}", limits.tokens_max, param)
            size *= 2

    def _encoded(
        self, token_ids: tuple[int, ...], text: str | None, generation: Generation
    ) -> EncodedPrompt:
        if not generation.shown.echo:
            return EncodedPrompt(token_ids, "")
        if text is None:
            text = self._tokenizer.decode(token_ids, generation.shown.skip_special_tokens)
        return EncodedPrompt(token_ids, text)


def _check_characters(count: int, param: str, limits: Limits) -> None:
    if count > limits.tokens_max * CHARACTERS_PER_TOKEN_MAX:
        raise context_length_exceeded(f"{count} characters", limits.tokens_max, param)


def _truncated(
    token_ids: tuple[int, ...], generation: Generation, limits: Limits
) -> tuple[int, ...]:
    """The last tokens, where the client wants it so."""
    keep = generation.encoding.truncate
    if keep is None:
        return token_ids
    if keep == -1:
        output = generation.max_tokens
        if output is None:
            output = max(1, generation.sampling.min_tokens)
        keep = max(1, limits.tokens_max - output)
    return token_ids[-keep:]
