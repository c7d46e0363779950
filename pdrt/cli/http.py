"""Small JSON documents from a gateway."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import msgspec

BODY_BYTES_MAX = 16 * 1024 * 1024


class Answer(msgspec.Struct, frozen=True):
    """`body` is the JSON document, or None if it was none."""

    status: int
    body: Any


def get_json(url: str, api_key: str | None, timeout_seconds: float) -> Answer:
    """Any HTTP status is an answer. Raises OSError (also as URLError) when nothing answers."""
    return _ask(urllib.request.Request(url, headers=_headers(api_key)), timeout_seconds)


def post_json(url: str, api_key: str | None, timeout_seconds: float) -> Answer:
    """POST without a body; as `get_json`."""
    request = urllib.request.Request(url, data=b"", headers=_headers(api_key), method="POST")
    return _ask(request, timeout_seconds)


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _ask(request: urllib.request.Request, timeout_seconds: float) -> Answer:
    # No proxy from the environment: a gateway on this host or network is asked directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as response:
            return Answer(response.status, _decode(response.read(BODY_BYTES_MAX)))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _decode(error.read(BODY_BYTES_MAX)))
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
