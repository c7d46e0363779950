"""What models write, and what clients see of it: one golden example per format and shape."""

from __future__ import annotations

import pytest

from tests.gateway.chat.parsing import Answer, parse

HERMES = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}'
LIST = '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]'
WEATHER = ("get_weather", {"city": "Paris", "days": 2})
TIME = ("get_time", {})


@pytest.mark.parametrize(
    ("style", "text", "calls", "content"),
    [
        ("hermes", HERMES, [WEATHER], ""),
        ("hermes", f"Let me see.\n{HERMES}\n", [WEATHER], "Let me see.\n"),
        ("hermes", f"{HERMES}\n{HERMES} Done.", [WEATHER, WEATHER], "Done."),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), [WEATHER], ""),
        ("hermes", f"{HERMES.removesuffix('</tool_call>')}{HERMES}", [WEATHER, WEATHER], ""),
        ("hermes", '<tool_call>{"name":"get_time"}</tool_call>', [TIME], ""),
        ("hermes", '<tool_call>{"arguments":{},"name":"get_time"}</tool_call>', [TIME], ""),
        ("hermes", '<tool_call>{"id":7,"name":"new"}</tool_call>', [("new", {})], ""),
        ("llama3_json", LLAMA, [WEATHER], ""),
        ("llama3_json", f" \n<|python_tag|>{LLAMA}", [WEATHER], ""),
        ("llama3_json", f"Sure: <|python_tag|>{LLAMA}", [WEATHER], "Sure: "),
        ("llama3_json", f"{LLAMA}; {LLAMA}", [WEATHER, WEATHER], ""),
        ("llama3_json", f"{LLAMA}\n{LLAMA}\nDone.", [WEATHER, WEATHER], "Done."),
        ("llama3_json", f'{{"type": "function", {LLAMA[1:]}', [WEATHER], ""),
        ("mistral", f"[TOOL_CALLS]{LIST}", [WEATHER], ""),
        ("mistral", f"[TOOL_CALLS] {LIST[:-1]}, {LIST[1:]} ok", [WEATHER, WEATHER], "ok"),
        ("mistral", '[TOOL_CALLS]get_time{}[TOOL_CALLS]get_time{} ', [TIME, TIME], ""),
        ("mistral", 'Hm.[TOOL_CALLS]get_time[CALL_ID]abcdef123[ARGS]{}', [TIME], "Hm."),
        ("pythonic", '[get_weather(city="Paris", days=2)]', [WEATHER], ""),
        ("pythonic", " [get_time(), get_weather(city='Paris', days=2,), ]", [TIME, WEATHER], ""),
        ("pythonic", "<|python_start|>[get_time()]<|python_end|>\n", [TIME], ""),
        ("pythonic", "[get_time()] as you wished", [TIME], "as you wished"),
    ],
)  # fmt: skip
def test_calls_are_found(
    style: str, text: str, calls: list[tuple[str, dict[str, object]]], content: str
) -> None:
    answer = parse(style, [text])
    assert answer.calls == calls
    assert answer.content == content


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "Plain text, < and <tool_ and {}."),
        ("hermes", "<tool_call>no call</tool_call>"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "arguments": {}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_time"'),
        ("hermes", "<tool_call>"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"name": "get_time", "age": 3}'),
        ("llama3_json", "  Plain {}"),
        ("llama3_json", f"First words, then {LLAMA}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", LIST),
        ("mistral", "[TOOL_CALLS] I will not"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]'),
        ("pythonic", "[1, 2, 3] is a list"),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[get_time"),
        ("pythonic", "[get_time(__import__('os'))]"),
        ("pythonic", "Text first [get_time()]"),
    ],
)
def test_what_only_looks_like_a_call_is_content_word_for_word(style: str, text: str) -> None:
    assert parse(style, [text]) == Answer(content=text)


@pytest.mark.parametrize(
    ("style", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}', '{"a": ', "True}}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, oops', '{"a": 1}', ", oops"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}, "id": 1, "name": 2}',
            "{}",
            ', "id": 1, "name": 2}',
        ),
        ("mistral", '[TOOL_CALLS]f{"a" 1}', '{"a" ', "1}"),
        ("pythonic", "[get_time(a=1, b=f())]", '{"a": 1, "b": ', "f())]"),
        ("pythonic", "[get_time(a=1, a=2)]", '{"a": 1', ", a=2)]"),
    ],
)
def test_a_call_that_breaks_off_is_content_from_there_on(
    style: str, text: str, arguments: str, content: str
) -> None:
    answer = parse(style, [text])
    assert answer.arguments == [arguments]
    assert answer.content == content


def test_a_call_that_the_output_ends_in_stays_cut() -> None:
    answer = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert answer == Answer(names=["f"], ids=["call_" + f"{0:024x}"], arguments=['{"a": "b'])


def test_arguments_are_passed_on_as_they_come() -> None:
    pieces = [
        '<tool_call>{"name": "f", "argum',
        'ents": {"a',
        '": "long',
        " text",
        '"}}</tool_call>',
    ]
    seen = parse("hermes", pieces).by_piece
    assert seen[1].startswith("call_") and seen[1].endswith('f {"a')
    assert seen[2:] == ['": "long', " text", '"}', ""]


def test_ids_are_what_the_format_wants() -> None:
    assert parse("hermes", [f"{HERMES}{HERMES}"]).ids == [f"call_{n:024x}" for n in range(2)]
    (short,) = parse("mistral", [f"[TOOL_CALLS]{LIST}"]).ids
    assert len(short) == 9 and short.isalnum()


@pytest.mark.parametrize(
    ("literal", "json"),
    [
        ("'it\\'s'", '"it\'s"'),
        ('"say \\"hi\\""', '"say \\"hi\\""'),
        ("'''a'b\nc'''", '"a\'b\\nc"'),
        ("''", '""'),
        ("'\\x41\\u00e9\\U0001f600\\101\\d\\\nz'", '"Aé😀A\\\\dz"'),
        ("'\\ud800'", '"\ufffd"'),
        ("'raw\nnewline'", '"raw\\nnewline"'),
        ("[1, -2.5, 1e3,]", "[1, -2.5, 1e3]"),
        ("(1, 'b')", '[1, "b"]'),
        ("(1,)", "[1]"),
        ("(1)", "1"),
        ("()", "[]"),
        ("{'k': {'n': None}, \"t\": True}", '{"k": {"n": null}, "t": true}'),
        ("false", "false"),
    ],
)
def test_literals_of_python_become_json(literal: str, json: str) -> None:
    assert parse("pythonic", [f"[get_time(a={literal})]"]).arguments == [f'{{"a": {json}}}']


@pytest.mark.parametrize(
    "literal",
    [
        "1 + 1", "x", "f''", "b''", "{1: 2}", "{1, 2}", "1j", "0x10", "1_000", "'\\N{DIGIT ONE}'",
        "'\\U00110000'", "'\\xzz'", "nan", "--1", "lambda: 0", "*a", "", "'open", "[1",
        "1 if 1 else 2", "().__class__", "'a' 'b'",
    ],
)  # fmt: skip
def test_other_expressions_break_the_call_off(literal: str) -> None:
    answer = parse("pythonic", [f"[get_time(z={literal})]"])
    assert answer.arguments[0].startswith('{"z": ')
    assert not answer.arguments[0].endswith("}")
    assert answer.content.endswith(")]") or literal == "'open"


def test_what_json_does_not_allow_but_models_write_is_mended() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb\\ud83d", "e": "\\ud83d\\ude00"}}'
    (arguments,) = parse("hermes", [text]).arguments
    assert arguments == '{"code": "a\\n\\tb\\ufffd", "e": "\\ud83d\\ude00"}'


def test_calls_that_are_too_many_are_left_out() -> None:
    answer = parse("hermes", [f"{HERMES}{HERMES} Done."], calls_max=1)
    assert answer.calls == [WEATHER]
    assert answer.content == "Done."
