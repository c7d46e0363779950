"""What surrounds every endpoint: CORS, gzip both ways, API keys."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from pdrt.gateway import http
from pdrt.gateway.compression import takes_gzip, unpack
from pdrt.gateway.errors import ApiError
from pdrt.gateway.origins import is_foreign
from tests.gateway.conftest import KEY, Deploy, Deployment, eventually
from tests.gateway.stand_in import begins, says

ORIGIN = "https://app.example"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "x"}


async def test_a_browser_may_ask_from_an_origin_that_is_allowed(deploy: Deploy) -> None:
    async with deploy(api={"cors_origin": (ORIGIN,), "api_key": (KEY, "k2")}) as deployment:
        _, decode = await deployment.pair()
        decode.on_submit = says(decode, deployment.ids("a"))
        preflight = {
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "authorization": "",
        }
        response = await deployment.http.options("/v1/completions", headers=preflight)
        assert response.status_code == 200, "asked without a key"
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in response.headers["access-control-allow-methods"]
        headers = {"origin": ORIGIN, "authorization": "Bearer k2"}
        response = await deployment.http.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        refused = await deployment.http.post("/v1/completions", json={}, headers=headers)
        assert refused.headers["access-control-allow-origin"] == ORIGIN, "errors can be read too"
        for origin in ("https://evil.example", "null"):
            response = await deployment.http.get("/health", headers={"origin": origin})
            assert "access-control-allow-origin" not in response.headers


async def test_without_the_flag_no_origin_may(deployment: Deployment) -> None:
    response = await deployment.http.get("/health", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


FOREIGN = [
    ({}, False),
    ({"host": "h:1", "origin": "http://h:1"}, False),
    ({"host": "h:1", "origin": "http://h:2"}, True),
    ({"host": "h:1", "origin": "null"}, True),
    ({"host": "h:1", "origin": ORIGIN}, False),
    ({"host": "proxy", "origin": "http://h:1", "sec-fetch-site": "same-origin"}, False),
    ({"host": "h:1", "origin": "http://h:1", "sec-fetch-site": "cross-site"}, True),
    ({"host": "h:1", "origin": "http://h:2", "sec-fetch-site": "same-site"}, True),
]


@pytest.mark.parametrize(("headers", "is_refused"), FOREIGN)
def test_whose_page_it_is(headers: dict[str, str], is_refused: bool) -> None:
    assert is_foreign(headers, (ORIGIN,)) is is_refused
    assert not is_foreign(headers, ("*",))


async def test_a_foreign_page_makes_nobody_do_anything(deployment: Deployment) -> None:
    """A browser posts plain text without asking beforehand."""
    _, decode = await deployment.pair()
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    for path in ("/v1/completions", "/v1/chat/completions", f"/workers/{decode.name}/drain"):
        response = await deployment.http.post(path, content=json.dumps(BODY), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (
            403,
            "origin_not_allowed",
        )
    assert not decode.submits
    assert (await deployment.http.get("/health", headers=headers)).status_code == 200


async def test_each_of_several_keys_opens(deploy: Deploy) -> None:
    async with deploy(api={"api_key": (KEY, "k2")}) as deployment:
        for key, status in ((KEY, 200), ("k2", 200), ("k", 401), (f"{KEY}k2", 401)):
            headers = {"authorization": f"Bearer {key}"}
            response = await deployment.http.get("/v1/models", headers=headers)
            assert response.status_code == status


async def test_a_large_answer_is_packed_and_a_small_one_is_not(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    for path, text in (("/v1/completions", "x" * 400), ("/v1/completions", "x")):
        body = {**BODY, "prompt": text, "echo": True, "logprobs": 1}
        plain, packed = [
            await deployment.http.post(path, json=body, headers={"accept-encoding": encoding})
            for encoding in ("identity", "br, gzip;q=0.5")
        ]
        assert "content-encoding" not in plain.headers
        is_large = len(plain.content) > 1024
        assert packed.headers.get("content-encoding") == ("gzip" if is_large else None)
        assert packed.headers["vary"] == "Accept-Encoding"
        assert packed.json()["choices"] == plain.json()["choices"]


async def test_events_are_never_packed(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = begins(decode, deployment.ids("abc"), 1)
    body = {**BODY, "stream": True}
    headers = {"accept-encoding": "gzip"}
    async with deployment.http.stream(
        "POST", "/v1/completions", json=body, headers=headers
    ) as response:
        assert "content-encoding" not in response.headers
        chunk = await anext(aiter(response.aiter_bytes()))
        assert chunk.startswith(b"data: {"), "it arrives while the output goes on"
    await eventually(lambda: decode.cancels, "cancelled upstream")


async def test_a_packed_request(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    decode.on_submit = says(decode, deployment.ids("a"))
    packed = gzip.compress(json.dumps(BODY).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    response = await deployment.http.post("/v1/completions", content=packed, headers=headers)
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == "a"
    for encoding, content, status in (
        ("br", packed, 415),
        ("gzip", b"no gzip", 400),
        ("gzip", packed[:-4], 400),
        ("gzip", packed + b"x", 400),
        ("gzip", b"", 400),
    ):
        headers = {"content-encoding": encoding}
        response = await deployment.http.post("/v1/completions", content=content, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, "Content-Encoding")


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    with pytest.raises(ApiError) as caught:
        unpack(bomb, "gzip", 1000)
    assert caught.value.status == 413
    with pytest.raises(ApiError):
        unpack(zlib.compress(b"{}"), "gzip", 1000)
    assert unpack(gzip.compress(b"x" * 1000), "gzip", 1000) == b"x" * 1000
    assert unpack(b"{}", "", 1000) == unpack(b"{}", "identity", 1000) == b"{}"


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=1.0", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("br", False),
        ("xgzip", False),
        ("", False),
    ],
)
def test_who_takes_gzip(header: str, takes: bool) -> None:
    assert takes_gzip({"accept-encoding": header}) is takes


async def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither which one is right, nor how much of one, shows in the time that it takes."""
    compared: list[bytes] = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return given == expected

    monkeypatch.setattr(http.hmac, "compare_digest", compare)
    keys = ("k1", "k2", "k3")
    passed: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        pass

    guard = http.ApiKey(app, keys, frozenset({"/health"}))
    for given, count in ((b"Bearer k1", 1), (b"Bearer k3", 2), (b"Bearer k", 2), (b"", 2)):
        compared.clear()
        scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", given)]}
        await guard(scope, None, send)  # type: ignore[arg-type]
        assert compared == [b"Bearer k1", b"Bearer k2", b"Bearer k3"]
        assert len(passed) == count
