"""What is refused before anybody compiles it."""

from __future__ import annotations

import json

import pytest

from pdrt.errors import RequestRefused
from pdrt.model.grammar_limits import DEPTH_MAX, TEXT_BYTES_MAX, check_grammar
from pdrt.sampling import Grammar, GrammarKind

SCHEMA, TAG = GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG
REGEX, EBNF = GrammarKind.REGEX, GrammarKind.EBNF


def nested(depth: int) -> str:
    """A schema of so many objects in each other."""
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SCHEMA, '{"type": "object"}'),
        (SCHEMA, "true"),
        (SCHEMA, nested(DEPTH_MAX)),
        (SCHEMA, json.dumps({"const": "é\u2028"})),
        (TAG, '{"type": "structural_tag", "format": {"type": "any_text"}}'),
        (REGEX, "a" * TEXT_BYTES_MAX),
        (EBNF, 'root ::= "a"'),
        (GrammarKind.JSON_OBJECT, ""),
    ],
)
def test_what_may_be_a_grammar(kind: GrammarKind, text: str) -> None:
    check_grammar(Grammar(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (SCHEMA, nested(DEPTH_MAX + 1), "nested deeper than 64"),
        (SCHEMA, "[" * 60_000, "nested deeper than 64"),
        (SCHEMA, "[" * 50_000 + "]" * 50_000, "nested deeper than 64"),
        (SCHEMA, '{"type":', "not valid JSON"),
        (SCHEMA, "", "not valid JSON"),
        (SCHEMA, "NaN", "not valid JSON"),
        (SCHEMA, '"abc"', "an object, true or false"),
        (TAG, "true", "a JSON object"),
        (REGEX, "a\0b", "NUL"),
        (REGEX, "\ud800", "not Unicode"),
        (REGEX, "", "empty"),
        (EBNF, " \n", "empty"),
        (REGEX, "a" * (TEXT_BYTES_MAX + 1), "131072 are the limit"),
        (EBNF, "é" * (TEXT_BYTES_MAX // 2 + 1), "131072 are the limit"),
    ],
)
def test_what_is_none(kind: GrammarKind, text: str, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        check_grammar(Grammar(kind, text))
