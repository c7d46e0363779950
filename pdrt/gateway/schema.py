"""The OpenAI requests that are understood, and their translation. Pure.

Every field is either served, or accepted at the one value that means "off", or refused by name:
nothing that a client asks for is silently left out. `user` and its like ask for nothing.

A body may hold millions of items. It is decoded straight into these types, which costs some tens
of milliseconds at worst (as untyped lists and dicts, the garbage collector made it seconds), and
its items are counted before any Python code looks at each.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdrt.gateway.errors import ApiError, context_length_exceeded, invalid
from pdrt.sampling import Sampling

STOPS_MAX = 64
STOP_CHARACTERS_MAX = 1024
"""Each stop string costs a search per token."""
STOP_TOKEN_IDS_MAX = 1024
"""They travel with the request."""
MESSAGES_MAX = 16_384
"""Each costs a turn of the chat template, some 40 µs; with it, a token at least."""
PARTS_MAX = 16_384
"""Parts of all messages together."""
OFF_BYTES_MAX = 256
"""A longer value is not among those that ask for nothing; it is not read."""
COMPLETION_TOKENS_DEFAULT = 16
"""As in OpenAI's completions API."""
_PARAM_IN_ERROR = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_FIELD_IN_ERROR = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

OFF: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not served, each with the values that ask for nothing; null always does."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints have in common. Null means the default everywhere."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 switch it off."""
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw
    """A string, a list of token ids, or a list that holds one of these."""


class ChatMessages(msgspec.Struct, frozen=True):
    """A prompt for the chat template."""

    messages: tuple[dict[str, str], ...]


Prompt = ChatMessages | str | tuple[int, ...]


class Generation(msgspec.Struct, frozen=True):
    """A validated request, but for what depends on the model."""

    model: str
    prompt: Prompt
    max_tokens: int | None
    """None: as many as the context holds."""
    max_tokens_param: str
    """The field that said so, for messages."""
    sampling: Sampling
    """All but `max_tokens` and `seed`."""
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


Body = TypeVar("Body", bound=_Body)


def parse_chat(body: bytes, tokens_max: int) -> Generation:
    """`tokens_max` is what the context holds. Raises `ApiError` naming the field."""
    chat = _decode(body, ChatBody)
    if chat.max_tokens is not None and chat.max_completion_tokens is not None:
        message = "'max_tokens' is the older name of 'max_completion_tokens'; give only one"
        raise invalid(message, "max_tokens")
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    tokens = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    return _generation(chat, _chat_messages(chat.messages, tokens_max), tokens, name)


def parse_completion(body: bytes, tokens_max: int) -> Generation:
    """`tokens_max` is what the context holds. Raises `ApiError` naming the field."""
    completion = _decode(body, CompletionBody)
    tokens = completion.max_tokens
    if tokens is None:
        tokens = max(COMPLETION_TOKENS_DEFAULT, completion.min_tokens or 0)
    return _generation(completion, _prompt(completion.prompt, tokens_max), tokens, "max_tokens")


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in OFF.keys() & fields.keys():
            _check_off(name, bytes(fields.pop(name)))
        rest = msgspec.json.encode(fields)
    except RecursionError:
        raise invalid("The body is nested too deeply", None) from None
    except msgspec.ValidationError:
        raise invalid("The body must be a JSON object", None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", None) from None
    try:
        return msgspec.json.decode(rest, type=kind)
    except RecursionError:
        raise invalid("The body is nested too deeply", None) from None
    except msgspec.ValidationError as error:
        raise _translate(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", None) from None


def _check_off(name: str, raw: bytes) -> None:
    if len(raw) <= OFF_BYTES_MAX:
        value = msgspec.json.decode(raw)
        # `1 == True` in Python, but not in JSON.
        if value is None or any(type(value) is type(o) and value == o for o in OFF[name]):
            return
    off = " or ".join(_json(value) for value in (*OFF[name], None))
    raise invalid(f"'{name}' is not supported here (accepted: {off})", name)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _translate(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """An error of msgspec, in words about a field."""
    match = _PARAM_IN_ERROR.match(text)
    assert match is not None
    what, path = match.group(1), match.group(2) or ""
    if (field := _FIELD_IN_ERROR.search(what)) is None:
        return invalid(f"Invalid value for '{path}': {what}", path or None)
    param = f"{path}.{field.group(1)}" if path else field.group(1)
    if what.startswith("Object missing"):
        return invalid(f"Missing required field '{param}'", param)
    known = [] if path else [f.name for f in msgspec.structs.fields(kind)]
    near = difflib.get_close_matches(field.group(1)[:100], known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return invalid(f"Unknown field '{param[:200]}'{hint}", param[:200])


def _generation(body: _Body, prompt: Prompt, tokens: int | None, tokens_param: str) -> Generation:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid("'stream_options' needs 'stream' to be true", "stream_options")
    min_tokens = body.min_tokens or 0
    if tokens is not None and min_tokens > tokens:
        raise invalid(f"'min_tokens' is more than '{tokens_param}' ({tokens})", "min_tokens")
    if len(body.stop_token_ids or ()) > STOP_TOKEN_IDS_MAX:
        raise invalid(f"'stop_token_ids' holds more than {STOP_TOKEN_IDS_MAX}", "stop_token_ids")
    sampling = Sampling(
        max_tokens=0,
        min_tokens=min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )
    return Generation(
        model=body.model,
        prompt=prompt,
        max_tokens=tokens,
        max_tokens_param=tokens_param,
        sampling=sampling,
        seed=None if body.seed is None else body.seed % 2**64,
        stops=_stops(body.stop),
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > STOPS_MAX:
        raise invalid(f"'stop' holds {len(stops)} strings; at most {STOPS_MAX}", "stop")
    if not all(stops):
        raise invalid("A stop string must not be empty", "stop")
    if any(len(stop) > STOP_CHARACTERS_MAX for stop in stops):
        raise invalid(f"A stop string has at most {STOP_CHARACTERS_MAX} characters", "stop")
    return tuple(stops)


def _chat_messages(messages: list[Message], tokens_max: int) -> ChatMessages:
    if len(messages) > MESSAGES_MAX:
        raise invalid(f"{len(messages)} messages; at most {MESSAGES_MAX}", "messages")
    if len(messages) > tokens_max:
        asked = f"{len(messages)} messages, each of a token at least"
        raise context_length_exceeded(asked, tokens_max, "messages")
    parts = sum(0 if isinstance(m.content, str) else len(m.content) for m in messages)
    if parts > PARTS_MAX:
        raise invalid(f"The messages hold {parts} parts; at most {PARTS_MAX}", "messages")
    return ChatMessages(tuple(_message(message) for message in messages))


def _message(message: Message) -> dict[str, str]:
    """As chat templates want it; OpenAI's `developer` is what they call `system`."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "".join([part.text for part in content])
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": content, **named}


_PROMPTS: tuple[Any, ...] = (str, list[int], tuple[str | list[int]])


def _prompt(raw: msgspec.Raw, tokens_max: int) -> Prompt:
    for kind in _PROMPTS:
        try:
            prompt = msgspec.json.decode(raw, type=kind)
            break
        except msgspec.ValidationError:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"The body is not valid JSON: {error}", None) from None
    else:
        message = (
            "'prompt' must be one string or one list of token ids; "
            "several prompts in one request are not supported"
        )
        raise invalid(message, "prompt")
    if isinstance(prompt, tuple):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > tokens_max:
        raise context_length_exceeded(len(prompt), tokens_max, "prompt")
    return tuple(prompt)
