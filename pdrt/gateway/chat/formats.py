"""What `response_format`, `structured_outputs` and `guided_*` ask for, as a grammar. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdrt.gateway.chat.bodies import (
    CHOICES_MAX,
    FormatFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TagStructure,
    TextFormat,
    given,
)
from pdrt.gateway.chat.json_text import decode_object, decode_object_or_string, encode
from pdrt.gateway.errors import invalid
from pdrt.sampling import Grammar, GrammarKind

Build = Callable[[str, int], Grammar]
"""Of the field's name and `grammar_bytes_max`."""


def response_grammar(fields: FormatFields, grammar_bytes_max: int) -> Grammar | None:
    """What the answer must look like; None: anything.

    Raises:
        ApiError: 400 naming the field: two formats at once, a schema that is no JSON, is nested
            too deeply or too large. Whether a compiler takes it, only workers know.
    """
    asked = _asked(fields)
    if len(asked) > 1:
        (first, _), (second, _), *_ = asked
        raise invalid(f"'{first}' and '{second}' exclude each other; give only one", second)
    if not asked:
        return None
    ((param, build),) = asked
    grammar = build(param, grammar_bytes_max)
    if len(grammar.text.encode(errors="surrogatepass")) > grammar_bytes_max:
        raise invalid(f"'{param}' is larger than {grammar_bytes_max} bytes", param)
    return grammar


def _asked(fields: FormatFields) -> list[tuple[str, Build]]:
    """Name and builder of every field that constrains the answer."""
    asked: list[tuple[str, Build]] = []
    response = fields.response_format
    if response is not None and not isinstance(response, TextFormat):
        asked.append(("response_format", lambda _, size: _of_response(response, size)))
    if fields.structured_outputs is not None:
        asked.extend(_of_outputs(fields.structured_outputs, "structured_outputs."))
    guided = StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    asked.extend(_of_outputs(guided, "guided_"))
    return asked


def _of_response(format: ResponseFormat, size_max: int) -> Grammar:
    match format:
        case JsonObjectFormat():
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case JsonSchemaFormat(json_schema):
            param = "response_format.json_schema.schema"
            schema = given(json_schema.schema)
            if schema is None:
                raise invalid(f"Missing required field '{param}'", param)
            return _json_schema(decode_object(schema, size_max, param))
        case StructuralTagFormat():
            return _tag(format, size_max, "response_format")
        case TextFormat():
            raise AssertionError("text asks for nothing")


def _of_outputs(outputs: StructuredOutputs, prefix: str) -> list[tuple[str, Build]]:
    """Of one set of fields, whose names begin with `prefix`."""
    asked: list[tuple[str, Build]] = []
    schema, tag = given(outputs.json), given(outputs.structural_tag)
    regex, choice, grammar = outputs.regex, outputs.choice, outputs.grammar
    if schema is not None:
        asked.append(
            (
                prefix + "json",
                lambda param, size: _json_schema(decode_object_or_string(schema, size, param)),
            )
        )
    if regex is not None:
        asked.append((prefix + "regex", lambda param, _: _text(GrammarKind.REGEX, regex, param)))
    if choice is not None:
        asked.append((prefix + "choice", lambda param, _: _choice(choice, param)))
    if grammar is not None:
        asked.append((prefix + "grammar", lambda param, _: _text(GrammarKind.EBNF, grammar, param)))
    if outputs.json_object:
        asked.append((prefix + "json_object", lambda _, __: Grammar(GrammarKind.JSON_OBJECT, "")))
    if tag is not None:
        asked.append(
            (prefix + "structural_tag", lambda param, size: _encoded_tag(tag, size, param))
        )
    return asked


def _json_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, encode(schema))


def _text(kind: GrammarKind, text: str, param: str) -> Grammar:
    if not text.strip():
        raise invalid(f"'{param}' must not be empty", param)
    return Grammar(kind, text)


def _choice(choices: list[str], param: str) -> Grammar:
    """As constants of a structural tag: JSON does the escaping, whatever the strings hold."""
    if not 0 < len(choices) <= CHOICES_MAX:
        raise invalid(f"'{param}' must hold 1 to {CHOICES_MAX} strings", param)
    if not all(choices):
        raise invalid(f"A string of '{param}' must not be empty", param)
    constants = [{"type": "const_string", "value": choice} for choice in choices]
    return _structural_tag({"type": "or", "elements": constants})


def _structural_tag(format: dict[str, Any]) -> Grammar:
    text = encode({"type": "structural_tag", "format": format})
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def _tag(tag: StructuralTagFormat, size_max: int, param: str) -> Grammar:
    format = given(tag.format)
    if (format is None) == (tag.structures is None):
        raise invalid("A structural tag has either 'format' or 'structures'", param)
    if format is not None:
        return _structural_tag(decode_object(format, size_max, param))
    return _structures(tag.structures or [], tag.triggers or [], size_max, param)


def _encoded_tag(raw: bytes, size_max: int, param: str) -> Grammar:
    text = encode(decode_object_or_string(raw, size_max, param))
    try:
        tag = msgspec.json.decode(text, type=StructuralTagFormat)
    except msgspec.ValidationError as error:
        raise invalid(f"Invalid value for '{param}': {error}", param) from None
    return _tag(tag, size_max, param)


def _structures(
    structures: list[TagStructure], triggers: list[str], size_max: int, param: str
) -> Grammar:
    """The older form: text is free until a trigger, which begins one of the structures."""
    if not structures or not triggers or not all(triggers):
        raise invalid("A structural tag needs 'structures' and 'triggers', none empty", param)
    for structure in structures:
        if not any(structure.begin.startswith(trigger) for trigger in triggers):
            raise invalid("Every structure's 'begin' must start with one of 'triggers'", param)
    tags = [
        {
            "type": "tag",
            "begin": structure.begin,
            "content": {
                "type": "json_schema",
                "json_schema": decode_object(bytes(structure.schema), size_max, param),
            },
            "end": structure.end,
        }
        for structure in structures
    ]
    return _structural_tag({"type": "triggered_tags", "triggers": triggers, "tags": tags})
