"""The fields of requests, as types. Null means the default everywhere. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdrt.gateway.chat.bodies import OMITTED, FormatFields, Message, Tool, ToolChoice
from pdrt.gateway.schema.bounds import CACHE_SALT_CHARACTERS_MAX
from pdrt.sampling import MinP, RepetitionPenalty, Temperature, TopK, TopP

Count = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

OFF: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": ("none",),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": (),
    "web_search_options": (),
}
"""Fields that are not served by an endpoint whose type does not have them, each with the values
that ask for nothing; null always does."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk carries the usage of its choice so far."""
    include_obfuscation: Literal[False] | None = None


class Body(FormatFields, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints have in common."""

    model: str | None = None
    """None means the one that is served."""
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[
            dict[Count, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}}),
        ]
        | None
    ) = None
    """By token id."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep that many of the prompt's last tokens; -1: as many as fit."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=CACHE_SALT_CHARACTERS_MAX)] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    """Labels for completions that OpenAI stores; nothing is stored here (`store` is refused)."""


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: msgspec.Raw = OMITTED
    """An object: variables of the chat template, `enable_thinking` for one."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    """False leaves reasoning out of the answer; it is computed (and counted) all the same."""


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _TOKEN_IDS,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]},
            "minItems": 1,
        },
    ]
}


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[msgspec.Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    """A string, a list of token ids, or a list of these."""
    echo: bool | None = None
    logprobs: Count | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a `prompt`, or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """By default those of a prompt are added; a chat template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = OMITTED
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Count]
