"""What the running gateway says of its API holds: bodies made from its description are answered as
described, and never with a failure; bodies that contradict it are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.deployment import HANG_SECONDS, Deployment
from tests.e2e.schemas import ANYTHING, values

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.e2e

EVENTS = {"/v1/completions": "Completion", "/v1/chat/completions": "ChatChunk"}
"""Of a stream, the type of each event, which OpenAPI cannot say."""
SHORTENED = {"max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 3}
"""Fields that are kept below, so that an answer ends soon."""
bounded = settings(
    max_examples=80,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class Described:
    """A deployment's API, by its own document."""

    def __init__(self, url: str, http: httpx2.Client) -> None:
        self._url, self._http = url, http
        document = http.get(f"{url}/openapi.json").json()
        self.components = document["components"]["schemas"]
        self.paths = document["paths"]

    def body(self, path: str) -> dict[str, Any]:
        """The schema of a request's body, without references."""
        schema = self.paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        found: dict[str, Any] = self._resolved(schema)
        return found

    def _resolved(self, node: Any) -> Any:
        """No type of this API holds itself."""
        if isinstance(node, list):
            return [self._resolved(item) for item in node]
        if not isinstance(node, dict):
            return node
        if isinstance(reference := node.get("$ref"), str):
            return self._resolved(self.components[reference.rsplit("/", 1)[1]])
        return {key: self._resolved(value) for key, value in node.items()}

    def call(self, method: str, path: str, content: bytes | None = None) -> httpx2.Response:
        """Asserts that the answer is one of those described, and no failure."""
        response = self._http.request(method, self._url + path, content=content)
        assert response.status_code < 500, response.text
        described = self.paths[path][method]["responses"][str(response.status_code)]["content"]
        media = response.headers["content-type"].partition(";")[0]
        assert media in described
        if media == "text/event-stream":
            self._assert_events(path, response.text)
        elif media == "application/json":
            self._assert_valid(response.json(), described[media]["schema"])
        return response

    def _assert_events(self, path: str, text: str) -> None:
        events = [event.removeprefix("data: ") for event in text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""], text
        for event in events[:-2]:
            self._assert_valid(json.loads(event), self.components[EVENTS[path]])

    def _assert_valid(self, value: Any, schema: dict[str, Any]) -> None:
        jsonschema.Draft202012Validator(self._resolved(schema)).validate(value)


@pytest.fixture
def described(tiny_up: Deployment) -> Iterator[Described]:
    with httpx2.Client(timeout=HANG_SECONDS, trust_env=False) as http:
        yield Described(tiny_up.url, http)


def with_a_plain_message(body: dict[str, Any]) -> dict[str, Any]:
    """Few conversations at random follow the rules of roles."""
    return {**body, "messages": [{"role": "user", "content": "Hello"}]}


def short(body: dict[str, Any]) -> dict[str, Any]:
    """So that it ends soon; a field keeps its type."""
    short = dict(body)
    for name in SHORTENED.keys() & body.keys():
        short[name] = None if body[name] is None else body[name] % SHORTENED[name]
    if body.get("n"):
        short["n"] = 1 + body["n"] % 3
    if body.get("max_completion_tokens") is None:
        short["max_tokens"] = short.get("max_tokens") or 2
    return short


def is_of_another_model(response: httpx2.Response) -> bool:
    return response.status_code == 404 and response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", [*EVENTS, "/tokenize", "/detokenize"])
def test_bodies_as_described(described: Described, path: str) -> None:
    schema = described.body(path)
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    bodies = values(schema)
    if path == "/v1/chat/completions":
        bodies |= bodies.map(with_a_plain_message)
    if path in EVENTS:
        bodies = bodies.map(short)
    statuses: set[int] = set()

    @bounded
    @given(bodies)
    def accepted_or_explained(body: dict[str, Any]) -> None:
        assert is_valid(body)
        response = described.call("post", path, json.dumps(body).encode())
        assert response.status_code in (200, 400) or is_of_another_model(response)
        statuses.add(response.status_code)

    @bounded
    @given(bodies, st.data())
    def refused(body: dict[str, Any], data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(schema["properties"])) | st.text(max_size=8))
        if name not in {*SHORTENED, "n"}:
            body = {**body, name: data.draw(ANYTHING)}
        response = described.call("post", path, json.dumps(body).encode())
        assert response.status_code in (200, 400) or is_of_another_model(response)
        assert is_valid(body) or response.status_code != 200, body

    @bounded
    @given(bodies, st.integers(0, 60), st.binary(max_size=4))
    def broken(body: dict[str, Any], length: int, junk: bytes) -> None:
        content = json.dumps(body).encode()[:length] + b"\xff" + junk
        assert described.call("post", path, content).status_code == 400

    accepted_or_explained()
    assert 200 in statuses
    refused()
    broken()


def test_what_is_read_is_as_described(described: Described) -> None:
    for path, methods in described.paths.items():
        if "get" in methods and "{" not in path:
            assert described.call("get", path).status_code == 200, path
