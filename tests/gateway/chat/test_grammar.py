"""What is asked for, as a grammar, and which outputs that grammar takes: xgrammar is asked."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

from pdrt.gateway.chat.bodies import FormatFields
from pdrt.gateway.chat.formats import response_grammar
from pdrt.gateway.chat.grammar import output_grammar
from pdrt.gateway.chat.styles import ReasoningStart, ToolStyle
from pdrt.gateway.chat.tools import ToolPlan
from pdrt.gateway.errors import ApiError
from pdrt.sampling import Grammar, GrammarKind
from tests.gateway.chat.parsing import NAMES, parse
from tests.model.tiny import EOS_ID, make_tokenizer

BYTES_MAX = 64 * 1024
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = (("get_weather", CITY), ("get_time", NOTHING))
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
}
TWICE = {
    "hermes": CALLS["hermes"] + "\n" + CALLS["hermes"],
    "llama3_json": CALLS["llama3_json"] + "; " + CALLS["llama3_json"],
    "mistral": CALLS["mistral"][:-1] + ", " + CALLS["mistral"].removeprefix("[TOOL_CALLS]["),
}
STYLES = sorted(CALLS)


@functools.cache
def compiler() -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(make_tokenizer(), stop_token_ids=[EOS_ID])
    return xgrammar.GrammarCompiler(info)


def takes(grammar: Grammar | None, text: str) -> bool:
    """Whether `text` is a whole output under `grammar`."""
    if grammar is None:
        return True
    xgrammar = pytest.importorskip("xgrammar")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            compiled = compiler().compile_json_schema(grammar.text)
        case GrammarKind.JSON_OBJECT:
            compiled = compiler().compile_json_schema('{"type": "object"}')
        case GrammarKind.REGEX:
            compiled = compiler().compile_regex(grammar.text)
        case GrammarKind.EBNF:
            compiled = compiler().compile_grammar(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            compiled = compiler().compile_structural_tag(grammar.text)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.accept_token(EOS_ID))


def asked(fields: dict[str, Any], bytes_max: int = BYTES_MAX) -> Grammar | None:
    body = msgspec.json.decode(msgspec.json.encode(fields), type=FormatFields)
    return response_grammar(body, bytes_max)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "c", "schema": CITY, "strict": True},
                }
            },
            '{"city": "Paris"}',
            '{"town": "Paris"}',
        ),
        ({"guided_json": CITY}, '{"city": ""}', "{}"),
        ({"guided_json": msgspec.json.encode(CITY).decode()}, '{"city": ""}', "{}"),
        ({"structured_outputs": {"json": CITY}}, '{"city": ""}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "x"),
        ({"guided_regex": "[a-c]{2}"}, "ab", "abc"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
        ({"guided_choice": ["a", "ab"]}, "ab", "b"),
        ({"guided_choice": ['say "hi"\n', "\\n", "[a-z]"]}, 'say "hi"\n', "q"),
        ({"guided_choice": ["\\n", "é日😀"]}, "é日😀", "\n"),
        ({"structured_outputs": {"choice": ["{", "root ::= x"]}}, "root ::= x", "root"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": CITY, "end": "</f>"}],
                }
            },
            'Look: <f>{"city": ""}</f> so',
            "Look: <f>{}</f>",
        ),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "type": "structural_tag",
                        "format": {"type": "const_string", "value": "x"},
                    }
                }
            },
            "x",
            "y",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", list(ReasoningStart))
def test_formats(fields: dict[str, Any], good: str, bad: str, start: ReasoningStart) -> None:
    thought = {
        ReasoningStart.OVER: "",
        ReasoningStart.POSSIBLE: "<think>\nHm { <f\n</think>\n\n",
        ReasoningStart.INSIDE: "Hm { <f\n</think>\n\n",
    }[start]
    grammar = output_grammar(asked(fields), ToolPlan(), start, BYTES_MAX)
    assert takes(grammar, thought + good)
    assert not takes(grammar, thought + bad)
    assert takes(grammar, good) is (start is not ReasoningStart.INSIDE)
    answer = parse(None, [thought + good], start)
    assert answer.content == good
    assert bool(answer.reasoning) is bool(thought)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}]
)
def test_nothing_asked_for_is_no_grammar(fields: dict[str, Any]) -> None:
    assert asked(fields) is None
    assert output_grammar(None, ToolPlan(), ReasoningStart.POSSIBLE, BYTES_MAX) is None


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_json": deep(65)}, "guided_json"),
        ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": "a" * (BYTES_MAX + 1)}, "guided_regex"),
        ({"guided_choice": ["é" * BYTES_MAX]}, "guided_choice"),
        ({"guided_json": {"enum": ["a" * BYTES_MAX]}}, "guided_json"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
         "response_format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"],
                              "structures": [{"begin": "b", "schema": {}, "end": ""}]}},
         "response_format"),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": 1}}},
         "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {"structures": 1}}},
         "structured_outputs.structural_tag"),
    ],
)  # fmt: skip
def test_formats_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def plan(style: str, **changes: Any) -> ToolPlan:
    return ToolPlan(style=ToolStyle(style), names=NAMES, schemas=SCHEMAS, **changes)


@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_is_a_call_and_the_parser_finds_it(style: str) -> None:
    grammar = output_grammar(None, plan(style, forced=True), ReasoningStart.OVER, BYTES_MAX)
    for text, count in ((CALLS[style], 1), (TWICE[style], 2)):
        assert takes(grammar, text)
        answer = parse(style, [text])
        assert answer.calls == [("get_weather", {"city": "Paris"})] * count
        assert answer.content == ""
    assert not takes(grammar, "Hello")
    assert not takes(grammar, "")
    assert not takes(grammar, "[TOOL_CALLS][]")
    assert not takes(grammar, CALLS[style].replace("city", "town"))
    assert not takes(grammar, CALLS[style].replace("get_weather", "get_time"))
    assert not takes(grammar, CALLS[style].replace("get_weather", "made_up"))


@pytest.mark.parametrize("style", STYLES)
def test_one_call_at_most(style: str) -> None:
    one = plan(style, forced=True, calls_max=1)
    grammar = output_grammar(None, one, ReasoningStart.OVER, BYTES_MAX)
    assert takes(grammar, CALLS[style])
    assert not takes(grammar, TWICE[style])


@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_comes_after_reasoning(style: str) -> None:
    grammar = output_grammar(None, plan(style, forced=True), ReasoningStart.INSIDE, BYTES_MAX)
    text = f"I could {CALLS[style]}\n</think>\n\n{CALLS[style]}"
    assert takes(grammar, text)
    assert not takes(grammar, CALLS[style])
    answer = parse(style, [text], ReasoningStart.INSIDE)
    assert answer.names == ["get_weather"]
    assert answer.reasoning == f"I could {CALLS[style]}"


@pytest.mark.parametrize("style", STYLES)
def test_strict_tools_leave_text_free_but_not_calls(style: str) -> None:
    grammar = output_grammar(None, plan(style, strict=True), ReasoningStart.OVER, BYTES_MAX)
    assert takes(grammar, "Hello!")
    assert takes(grammar, f"Well: {CALLS[style]}")
    assert takes(grammar, TWICE[style])
    assert not takes(grammar, CALLS[style].replace("city", "town"))


@pytest.mark.parametrize("style", STYLES)
def test_with_a_response_format_the_model_chooses_between_calls_and_answer(style: str) -> None:
    response = asked({"guided_json": CITY})
    grammar = output_grammar(response, plan(style), ReasoningStart.OVER, BYTES_MAX)
    assert takes(grammar, '{"city": "Rome"}')
    assert takes(grammar, CALLS[style])
    assert not takes(grammar, "Hello")


def test_where_the_model_may_choose_nothing_is_imposed() -> None:
    free = output_grammar(None, plan("hermes"), ReasoningStart.POSSIBLE, BYTES_MAX)
    assert free is None


@pytest.mark.parametrize(
    ("response", "style", "bytes_max", "param"),
    [
        (None, "hermes", 100, "tools"),
        ({"guided_regex": "a"}, "pythonic", BYTES_MAX, "response_format"),
    ],
)
def test_grammars_that_are_refused(response: Any, style: str, bytes_max: int, param: str) -> None:
    forced = plan(style, forced=response is None)
    grammar = None if response is None else asked(response)
    with pytest.raises(ApiError) as refused:
        output_grammar(grammar, forced, ReasoningStart.OVER, bytes_max)
    assert (refused.value.status, refused.value.param) == (400, param)
