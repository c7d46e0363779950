"""From JSON to the types of `bodies`; what is wrong, in words about a field. Pure."""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

import msgspec

from pdrt.gateway.errors import ApiError, invalid
from pdrt.gateway.schema.bodies import OFF
from pdrt.gateway.schema.bounds import OFF_BYTES_MAX

_PARAM_IN_ERROR = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_FIELD_IN_ERROR = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)

Kind = TypeVar("Kind", bound=msgspec.Struct)


def decode(body: bytes, kind: type[Kind], off: bool = True) -> Kind:
    """`off`: the fields of `OFF` may be given too, at a value that asks for nothing.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        if off:
            body = _without_off(body, kind)
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise invalid("The body is nested too deeply", None) from None
    except msgspec.ValidationError as error:
        raise _translate(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}", None) from None


def _without_off(body: bytes, kind: type[msgspec.Struct]) -> bytes:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise invalid("The body must be a JSON object", None) from None
    names = OFF.keys() & fields.keys() - set(kind.__struct_fields__)
    if not names:
        return body
    for name in names:
        _check_off(name, bytes(fields.pop(name)))
    return msgspec.json.encode(fields)


def _check_off(name: str, raw: bytes) -> None:
    if len(raw) <= OFF_BYTES_MAX:
        value = msgspec.json.decode(raw)
        # `1 == True` in Python, but not in JSON.
        if value is None or any(type(value) is type(o) and value == o for o in OFF[name]):
            return
    off = " or ".join(msgspec.json.encode(value).decode() for value in (*OFF[name], None))
    raise invalid(f"'{name}' is not supported here (accepted: {off})", name)


def _translate(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """An error of msgspec, in words about a field."""
    match = _PARAM_IN_ERROR.match(text)
    assert match is not None
    what, path = match.group(1), (match.group(2) or "").replace("[...]", "")
    if (field := _FIELD_IN_ERROR.search(what)) is None:
        return invalid(f"Invalid value for '{path}': {what}", path or None)
    param = f"{path}.{field.group(1)}" if path else field.group(1)
    if what.startswith("Object missing"):
        return invalid(f"Missing required field '{param}'", param)
    known = [] if path else [f.name for f in msgspec.structs.fields(kind)]
    near = difflib.get_close_matches(field.group(1)[:100], known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return invalid(f"Unknown field '{param[:200]}'{hint}", param[:200])
