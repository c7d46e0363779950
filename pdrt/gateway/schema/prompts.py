"""The `prompt` of completions. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdrt.gateway.errors import context_length_exceeded, invalid
from pdrt.gateway.schema.bounds import Limits

Kind = TypeVar("Kind")

_EXPECTED = "a string, a list of token ids, or a list of these"


def parse_prompts(raw: msgspec.Raw, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, at least one.

    Raises:
        ApiError: 400 naming `prompt`.
    """
    if (single := _single(raw)) is not None:
        return (_bounded(single, limits),)
    items = _decoded(raw, list[msgspec.Raw])
    if items is None:
        raise invalid(f"'prompt' must be {_EXPECTED}", "prompt")
    if not 0 < len(items) <= limits.choices_max:
        message = f"'prompt' holds {len(items)} prompts; at least 1, at most {limits.choices_max}"
        raise invalid(message, "prompt")
    prompts = []
    for index, item in enumerate(items):
        prompt = _single(item)
        if prompt is None:
            raise invalid(f"'prompt' must be {_EXPECTED}; item {index} is neither", "prompt")
        prompts.append(_bounded(prompt, limits))
    return tuple(prompts)


def _single(raw: msgspec.Raw) -> str | list[int] | None:
    text = _decoded(raw, str)
    if text is not None:
        return text
    token_ids = _decoded(raw, list[int])
    # An empty list might be no prompts as well.
    return token_ids or None


def _decoded(raw: msgspec.Raw, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", None) from None


def _bounded(prompt: str | list[int], limits: Limits) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) > limits.tokens_max:
        raise context_length_exceeded(len(prompt), limits.tokens_max, "prompt")
    return tuple(prompt)
