"""The description of the API says what the API does: every route, and every field both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pdrt.config import GatewayConfig
from pdrt.gateway.app import api_routes
from pdrt.gateway.errors import ApiError
from pdrt.gateway.hub import Hub
from pdrt.gateway.openapi import openapi
from pdrt.gateway.schema.bodies import OFF, CompletionBody
from pdrt.gateway.schema.bounds import Limits
from pdrt.gateway.schema.decoding import decode
from pdrt.gateway.schema.parsing import parse_chat, parse_completion, parse_tokenize
from pdrt.gateway.served_model import ServedModel
from pdrt.ids import Incarnation
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from tests.gateway.conftest import Deployment

LIMITS = Limits(tokens_max=512, choices_max=128, logprobs_max=20, grammar_bytes_max=65536)
DOCUMENT: dict[str, Any] = msgspec.json.decode(openapi("tiny", True, frozenset({"/health"})))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]

MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMMON: dict[str, Any] = {
    "add_special_tokens": True,
    "cache_salt": "salt",
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": -3.5},
    "max_tokens": 7,
    "min_p": 0.1,
    "min_tokens": 2,
    "model": "tiny",
    "metadata": {"team": "blue"},
    "n": 2,
    "presence_penalty": -2,
    "prompt_cache_key": "k",
    "prompt_logprobs": 2,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "x",
    "seed": -5,
    "skip_special_tokens": False,
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "stream": True,
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "top_k": -1,
    "top_p": 0.5,
    "truncate_prompt_tokens": 100,
    "user": "me",
}
"""A value for every field of both bodies; each alone beside the required ones."""
VALUES: dict[str, dict[str, Any]] = {
    "ChatBody": {
        **COMMON,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
        "include_reasoning": False,
        "logprobs": True,
        "max_completion_tokens": 5,
        "messages": [MESSAGE],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [TOOL],
    },
    "CompletionBody": {**COMMON, "echo": True, "logprobs": 3, "prompt": ["a", [1, 2]]},
    "TokenizeBody": {
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": True,
        "messages": [MESSAGE],
        "model": "tiny",
        "return_token_strs": True,
        "tools": [TOOL],
    },
}
TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}
"""Fields that need another one."""
REQUIRED: dict[str, dict[str, Any]] = {
    "ChatBody": {"messages": [MESSAGE]},
    "CompletionBody": {"prompt": "x"},
    "TokenizeBody": {"messages": [MESSAGE]},
}
PARSERS: dict[str, Callable[[bytes, Limits], object]] = {
    "ChatBody": parse_chat,
    "CompletionBody": parse_completion,
    "TokenizeBody": parse_tokenize,
}


def parse(kind: str, fields: dict[str, Any]) -> None:
    PARSERS[kind](msgspec.json.encode({**REQUIRED[kind], **fields}), LIMITS)


def refused(kind: str, fields: dict[str, Any]) -> str | None:
    with pytest.raises(ApiError) as caught:
        parse(kind, fields)
    assert caught.value.status == 400
    return caught.value.param


def own_fields(kind: str) -> set[str]:
    """Those that are served."""
    return {name for name, s in SCHEMAS[kind]["properties"].items() if not _is_off(s)}


def _is_off(schema: dict[str, Any]) -> bool:
    return str(schema.get("description", "")).startswith("Not supported")


@pytest.mark.parametrize("kind", VALUES)
def test_every_field_that_is_described_is_accepted_and_no_other(kind: str) -> None:
    alone = own_fields(kind) - TOGETHER.keys() - {"prompt"}
    assert alone == VALUES[kind].keys() - {"prompt"}
    for name in own_fields(kind):
        if name in TOGETHER:
            parse(kind, TOGETHER[name])
        elif name in VALUES[kind]:
            parse(kind, {name: VALUES[kind][name]})
    assert refused(kind, {"invented": 1}) == "invented"
    assert SCHEMAS[kind]["additionalProperties"] is False
    assert set(SCHEMAS[kind].get("required", ())) <= REQUIRED[kind].keys()


@pytest.mark.parametrize("kind", VALUES)
def test_null_is_a_value_wherever_the_description_says_so(kind: str) -> None:
    for name in own_fields(kind):
        schema = SCHEMAS[kind]["properties"][name]
        may_be_null = (
            {"type": "null"} in schema.get("anyOf", ())
            or None in schema.get("enum", ())
            or not schema
        )
        if name in REQUIRED[kind]:
            continue
        assert may_be_null, name
        parse(kind, {name: None})


@pytest.mark.parametrize("kind", ["ChatBody", "CompletionBody"])
def test_fields_that_are_off_have_the_described_values_and_no_other(kind: str) -> None:
    described = SCHEMAS[kind]["properties"].keys() - own_fields(kind)
    assert described == OFF.keys() - own_fields(kind)
    for name in described:
        values = SCHEMAS[kind]["properties"][name]["enum"]
        assert values == [*OFF[name], None]
        for value in values:
            parse(kind, {name: value})
        assert refused(kind, {name: "something else"}) == name


def bounds(kind: str) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    for name, schema in SCHEMAS[kind]["properties"].items():
        for option in schema.get("anyOf", [schema]):
            for key in ("minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength"):
                if key in option and name != "prompt":
                    yield name, key, option[key], option


@pytest.mark.parametrize("kind", ["ChatBody", "CompletionBody"])
def test_bounds_are_those_that_are_described(kind: str) -> None:
    seen = set()
    for name, key, bound, schema in bounds(kind):
        step = 1 if schema["type"] != "number" else 0.001
        beyond: Any = bound + step if key.startswith("max") else bound - step
        if schema["type"] == "string":
            beyond = "x" * int(bound + (1 if key == "maxLength" else -1))
        elif key == "exclusiveMinimum":
            beyond = bound
        assert refused(kind, {name: beyond}) == name
        seen.add(name)
    assert seen >= {"temperature", "top_p", "top_k", "n", "presence_penalty", "cache_salt"}


def test_every_route_is_described(tokenizer: Tokenizer) -> None:
    config = GatewayConfig()
    identity = ModelIdentity("tiny", "d1", 512, 380, (), "LlamaForCausalLM")
    model = ServedModel(identity, "tiny", tokenizer)
    hub = Hub(config, ("d1",), Incarnation(1), lambda peer, frame: True)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in api_routes(hub, model, config)
        for method in (route.methods or set()) - {"HEAD"}
    }
    model.close()
    described = {(p, method) for p, methods in DOCUMENT["paths"].items() for method in methods}
    assert routes == described


def test_references_lead_somewhere() -> None:
    def refs(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from refs(value)
        elif isinstance(node, list):
            for value in node:
                yield from refs(value)

    names = {ref.removeprefix("#/components/schemas/") for ref in refs(DOCUMENT)}
    assert names <= SCHEMAS.keys()


def test_keys_are_described_where_they_are_asked_for() -> None:
    assert "401" in DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert "security" not in DOCUMENT["paths"]["/health"]["get"]
    document = msgspec.json.decode(openapi("tiny", False, frozenset()))
    assert "securitySchemes" not in document["components"]
    assert "401" not in document["paths"]["/v1/completions"]["post"]["responses"]


async def test_it_is_served_and_statuses_are_those_described(deployment: Deployment) -> None:
    served = (await deployment.http.get("/openapi.json")).json()
    assert served["openapi"] == "3.1.0"
    for path, methods in served["paths"].items():
        for method, operation in methods.items():
            for content in (b"", b"{}", b"[1", b'{"model": 5}'):
                url = path.replace("{", "").replace("}", "")
                response = await deployment.http.request(method, url, content=content)
                assert str(response.status_code) in operation["responses"], (path, content)
                if response.status_code not in (200, 503) and path != "/debug/check":
                    kind = msgspec.json.decode(response.content)["error"]["type"]
                    assert kind == "invalid_request_error"


def test_a_body_is_decoded_the_same_with_and_without_fields_that_are_off() -> None:
    body = {"model": "tiny", "prompt": "x", "seed": 3}
    plain = decode(msgspec.json.encode(body), CompletionBody)
    assert decode(msgspec.json.encode({**body, "store": False}), CompletionBody) == plain
