"""JSON that clients hand in for others to read: schemas, arguments, variables. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt.gateway.errors import invalid

DEPTH_MAX = 64
"""Containers within containers. Templates, their JSON filter and grammar compilers recurse."""


def decode_object(text: bytes | str, bytes_max: int, param: str) -> dict[str, Any]:
    """The object that `text` holds, its keys in order.

    Raises:
        ApiError: 400 naming `param`: it is no JSON object, too large, or nested too deeply.
    """
    if len(text) > bytes_max:
        raise invalid(f"'{param}' is larger than {bytes_max} bytes", param)
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(param) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise invalid(f"'{param}' is not valid JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise invalid(f"'{param}' must be a JSON object", param)
    if not is_shallow(value):
        raise _too_deep(param)
    return value


def decode_object_or_string(text: bytes, bytes_max: int, param: str) -> dict[str, Any]:
    """As `decode_object`; `text` may also be a JSON string that holds the object."""
    if len(text) > bytes_max or not text.startswith(b'"'):
        return decode_object(text, bytes_max, param)
    try:
        inner = msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise invalid(f"'{param}' is not valid JSON: {error}", param) from None
    return decode_object(inner, bytes_max, param)


def is_shallow(value: object) -> bool:
    """Whether at most `DEPTH_MAX` containers are within each other. Level by level, so that a
    deep value does not exhaust the stack here."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [item for container in level for item in _items(container)]
        if not level:
            return True
    return not any(isinstance(item, dict | list) for item in level)


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, dict | list)]
    return []


def encode(value: object) -> str:
    """Compact JSON: equal values give equal text, but for the order of keys."""
    return msgspec.json.encode(value).decode()


def _too_deep(param: str) -> Exception:
    return invalid(f"'{param}' is nested deeper than {DEPTH_MAX} levels", param)
