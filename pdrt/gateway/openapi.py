"""The description of the API, made from the types that requests are decoded into and answers are
encoded from. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pdrt import __version__
from pdrt.gateway.schema.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    ErrorAnswer,
    HealthAnswer,
    ModelCard,
    ModelList,
    ReadyAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from pdrt.gateway.schema.bodies import (
    OFF,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
WORDS = {
    200: "Done",
    400: "A field is wrong; `param` names it",
    401: "The API key is missing or wrong",
    403: "A web page of another origin is behind it, which --cors-origin does not name",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    409: "Not now, or not clear which",
    413: "The body is too large",
    415: "The body is packed in a way that nobody here unpacks",
    429: "Too much is going on; try again",
    500: "A worker failed, or an invariant is broken",
    503: "No pair of workers can serve, or the gateway is shutting down; try again",
    504: "The request took too long",
}
BODY_ERRORS = (400, 403, 404, 408, 413, 415, 429, 503)


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    answers: dict[str, type | Schema]
    """By media type, of status 200."""
    body: type | None = None
    errors: tuple[int, ...] = ()
    """Statuses with an OpenAI error; besides 401, where keys are asked for."""
    others: dict[int, type | Schema] = {}
    """Statuses with another answer than an error."""
    parameters: tuple[str, ...] = ()
    """In the path."""


JSON, EVENTS, PROMETHEUS = "application/json", "text/event-stream", "text/plain"
OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        {JSON: ChatCompletion, EVENTS: ChatChunk},
        ChatBody,
        (*BODY_ERRORS, 500, 504),
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue one or several prompts",
        {JSON: Completion, EVENTS: Completion},
        CompletionBody,
        (*BODY_ERRORS, 500, 504),
    ),
    Operation(
        "post", "/tokenize", "Text to token ids", {JSON: TokenizeAnswer}, TokenizeBody, BODY_ERRORS
    ),
    Operation(
        "post",
        "/detokenize",
        "Token ids to text",
        {JSON: DetokenizeAnswer},
        DetokenizeBody,
        BODY_ERRORS,
    ),
    Operation("get", "/v1/models", "The one model", {JSON: ModelList}),
    Operation(
        "get",
        "/v1/models/{model}",
        "The model, if it has that name",
        {JSON: ModelCard},
        errors=(404,),
        parameters=("model",),
    ),
    Operation("get", "/version", "Of this gateway", {JSON: VersionAnswer}),
    Operation("get", "/health", "The process is alive", {JSON: HealthAnswer}),
    Operation(
        "get",
        "/ready",
        "Whether workers can serve; with reasons, not as a full pair",
        {JSON: ReadyAnswer},
        others={503: ReadyAnswer},
    ),
    Operation("get", "/metrics", "Of the gateway and every worker", {PROMETHEUS: TEXT}),
    Operation("get", "/status", "All there is to know", {JSON: ANY_OBJECT}),
    Operation(
        "get",
        "/debug/check",
        "Check all invariants everywhere",
        {JSON: ANY_OBJECT},
        others={500: ANY_OBJECT},
    ),
    Operation(
        "post",
        "/workers/{worker}/drain",
        "Have a worker finish what it has, and leave",
        {JSON: ANY_OBJECT},
        errors=(403, 404, 409),
        parameters=("worker",),
    ),
    Operation(
        "post",
        "/workers/{worker}/gone",
        "Say that a worker's process is dead, so that nobody waits for it",
        {JSON: ANY_OBJECT},
        errors=(403, 404, 409),
        parameters=("worker",),
    ),
    Operation("get", "/openapi.json", "This description", {JSON: ANY_OBJECT}),
)


def openapi(model: str, has_keys: bool, open_paths: frozenset[str]) -> bytes:
    """The document, as JSON. `has_keys`: paths other than `open_paths` need an API key."""
    types = {
        kind
        for operation in OPERATIONS
        for kind in (*operation.answers.values(), *operation.others.values(), operation.body)
        if isinstance(kind, type)
    } | {ErrorAnswer}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    refs, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(ordered, refs, strict=True))
    for body in (ChatBody, CompletionBody):
        _add_off(components[body.__name__], body)
        components[body.__name__]["properties"]["model"] = {"enum": [model, None]}
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        is_closed = has_keys and operation.path not in open_paths
        paths.setdefault(operation.path, {})[operation.method] = _described(
            operation, by_type, is_closed
        )
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "pdrt", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        key = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {"key": key}
    return msgspec.json.encode(document)


def _add_off(component: Schema, body: type[msgspec.Struct]) -> None:
    """The fields that are accepted at values that ask for nothing."""
    for name in sorted(OFF.keys() - set(body.__struct_fields__)):
        component["properties"][name] = {
            "enum": [*OFF[name], None],
            "description": "Not supported: these values ask for nothing.",
        }


def _described(operation: Operation, by_type: dict[type, Schema], is_closed: bool) -> Schema:
    def schema(kind: type | Schema) -> Schema:
        return by_type[kind] if isinstance(kind, type) else kind

    answers = {media: schema(kind) for media, kind in operation.answers.items()}
    if EVENTS in answers:
        answers[EVENTS] = _events(answers[EVENTS])
    responses = {200: _response(200, answers)}
    for status in (*operation.errors, *((401,) if is_closed else ())):
        responses[status] = _response(status, {JSON: by_type[ErrorAnswer]})
    for status, kind in operation.others.items():
        responses[status] = _response(status, {JSON: schema(kind)})
    described: Schema = {
        "summary": operation.summary,
        "responses": {str(status): responses[status] for status in sorted(responses)},
    }
    if is_closed:
        described["security"] = [{"key": []}]
    if operation.body is not None:
        content = {JSON: {"schema": by_type[operation.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT}
            for name in operation.parameters
        ]
    return described


def _events(of_each: Schema) -> Schema:
    # OpenAPI 3.1 has no words for it.
    return {
        "description": "Server-sent events, where the body asks to `stream`. The `data` of each is "
        "JSON as in `x-event-data`, but for the last: `[DONE]`. After an error there is none.",
        "x-event-data": of_each,
    }


def _response(status: int, content: dict[str, Schema]) -> Schema:
    return {
        "description": WORDS[status],
        "content": {media: {"schema": schema} for media, schema in content.items()},
    }
