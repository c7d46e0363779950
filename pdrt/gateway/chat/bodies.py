"""What a chat request may say of messages, tools and formats. Pure.

Types that request bodies are decoded into; who reads them checks what types cannot say. Schemas
stay undecoded JSON until their size is known: as untyped objects they cost the garbage collector
dearly.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$(?!\n)"
"""As OpenAI's; it is also what makes names safe inside every call format. (The end is written so
that it means the same here and in ECMAScript, whose expressions those of JSON schemas are.)"""
TOOLS_MAX = 128
"""As OpenAI's."""
ID_CHARACTERS_MAX = 256
CHOICES_MAX = 1024
"""Alternatives of a `choice`; each is one in the grammar."""

NULL = msgspec.Raw(b"null")
"""The value of undecoded fields that are not given; see `given`. (`Raw | None` would accept null
alone.)"""
OMITTED: Any = msgspec.field(default_factory=lambda: NULL)
"""Their default. (As a plain one it could not be described as JSON schema.)"""

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
CallId = Annotated[str, Meta(min_length=1, max_length=ID_CHARACTERS_MAX)]


class TextPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A call as the assistant made it."""

    name: Name
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: CallId
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None
    """Clients that join a stream's deltas send it back; it says nothing."""


class Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One message of the conversation; `messages.template_messages` checks which role may have
    what."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""
    refusal: None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """Clients send back answers as they got them, with these null or empty."""


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: msgspec.Raw = OMITTED
    """A JSON schema of an object; none means that there are no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Name


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. `strict` or not, the answer obeys the schema."""

    name: Name
    schema: msgspec.Raw = OMITTED
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag="text"):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: JsonSchema


class TagStructure(msgspec.Struct, forbid_unknown_fields=True):
    """`begin`, then JSON of `schema`, then `end`."""

    begin: str
    schema: msgspec.Raw
    end: str


class StructuralTagFormat(msgspec.Struct, forbid_unknown_fields=True, tag="structural_tag"):
    """vLLM's: xgrammar's `format`, or the older `structures` with `triggers`."""

    format: msgspec.Raw = OMITTED
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; exactly one may be given."""

    json: msgspec.Raw = OMITTED
    """A JSON schema, or a string that holds one."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF-like, starting with `root`."""
    json_object: bool | None = None
    structural_tag: msgspec.Raw = OMITTED
    """A structural tag, or a string that holds one."""


class FormatFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of completions and chat that say what the output looks like; a base of both bodies.

    The chat body adds, all optional but the first (structs of msgspec have one base only):

        messages: Annotated[list[Message], Meta(min_length=1)]
        tools: list[Tool]
        tool_choice: ToolChoice
        parallel_tool_calls: bool
        chat_template_kwargs: msgspec.Raw = NULL         (see `messages.template_kwargs`)
        add_generation_prompt: bool
        continue_final_message: bool
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = OMITTED
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def given(raw: msgspec.Raw) -> bytes | None:
    """The JSON of an undecoded field; None where it is missing or null."""
    text = bytes(raw)
    return None if text == b"null" else text
