"""What of a grammar can be refused before anybody compiles it. Cheap; imports neither torch nor
xgrammar, so that a gateway can tell at once. Whether it compiles, the workers find out."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdrt.errors import RequestRefused
from pdrt.sampling import Grammar, GrammarKind

TEXT_BYTES_MAX = 128 * 1024
"""A grammar travels in one message to the process that compiles it."""
DEPTH_MAX = 64
"""Objects and arrays in each other, in a schema or tag; an object of a schema takes two. xgrammar's
time grows with the third power of the depth: 0.06 s for 50, 5 s for 200."""


def check_grammar(grammar: Grammar) -> None:
    """Refuse what cannot be a grammar of its kind, or is too large or too deep.

    Raises:
        RequestRefused: why, in words.
    """
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise RequestRefused(f"it is not Unicode text: {error.reason}") from error
    if size > TEXT_BYTES_MAX:
        raise RequestRefused(f"it has {size} bytes, {TEXT_BYTES_MAX} are the limit")
    if "\0" in grammar.text:
        raise RequestRefused("it holds a NUL character")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            _check_json(grammar.text, (dict, bool), "a JSON schema is an object, true or false")
        case GrammarKind.STRUCTURAL_TAG:
            _check_json(grammar.text, (dict,), "a structural tag is a JSON object")
        case GrammarKind.REGEX | GrammarKind.EBNF:
            if not grammar.text.strip():
                raise RequestRefused("it is empty")
        case GrammarKind.JSON_OBJECT:
            pass


def _check_json(text: str, kinds: tuple[type, ...], what: str) -> None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RequestRefused(f"it is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestRefused(f"it is nested deeper than {DEPTH_MAX} levels") from error
    if not isinstance(value, kinds):
        raise RequestRefused(what)
    if _is_deeper(value):
        raise RequestRefused(f"it is nested deeper than {DEPTH_MAX} levels")


def _is_deeper(value: object) -> bool:
    """Level by level, as recursion has its own limit."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for item in level for inner in _items(item)]
    return any(isinstance(item, dict | list) for item in level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
