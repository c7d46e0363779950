"""A running gateway as `pdrt status` and `pdrt drain` ask it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pdrt.cli.flags import KNOWN_KEYS, Parser
from pdrt.cli.http import Answer, get_json, post_json
from pdrt.cli.load import layer_from_environment
from pdrt.errors import PdrtError

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_SECONDS_MAX = 10.0
EPILOG = "PDRT_URL and PDRT_API_KEY in the environment stand in for the flags."


def add_address_flags(parser: Parser) -> None:
    parser.add_argument("--url", metavar="TEXT", help=f"the gateway (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="TEXT", help="sent as a bearer token")


class Gateway:
    """Where it is, and what it says."""

    def __init__(
        self, flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> None:
        """`flags` as `add_address_flags` has them parsed.

        Raises:
            PdrtError: a variable is misspelt, or the address is none.
        """
        layer_from_environment({}, KNOWN_KEYS, environment)  # refuses misspelt variables
        self.url = (flags["url"] or environment.get("PDRT_URL") or DEFAULT_URL).rstrip("/")
        self._api_key = flags["api_key"] or environment.get("PDRT_API_KEY") or None
        if not _is_address(self.url):
            raise PdrtError(f"--url {self.url} is not an http:// or https:// address")

    def status(self) -> dict[str, Any]:
        """Of the whole deployment.

        Raises:
            PdrtError: nothing answers there, or no gateway does.
        """
        try:
            answer = get_json(f"{self.url}/status", self._api_key, ANSWER_SECONDS_MAX)
        except OSError as error:
            raise self._no_answer(error) from error
        self._check(answer)
        body = answer.body
        if answer.status != 200 or not isinstance(body, dict) or "workers" not in body:
            raise PdrtError(f"{self.url}/status answered {answer.status}: is this a pdrt gateway?")
        return body

    def post(self, path: str) -> Answer:
        """POST without a body.

        Raises:
            PdrtError: nothing answers there, or it wants another API key.
        """
        try:
            answer = post_json(f"{self.url}{path}", self._api_key, ANSWER_SECONDS_MAX)
        except OSError as error:
            raise self._no_answer(error) from error
        self._check(answer)
        return answer

    def _no_answer(self, error: OSError) -> PdrtError:
        reason = getattr(error, "reason", error)
        return PdrtError(
            f"nothing answers at {self.url} ({reason}); start it with `pdrt up`, "
            "or name it with --url"
        )

    def _check(self, answer: Answer) -> None:
        if answer.status in (401, 403):
            wants = "refuses this API key" if self._api_key else "wants an API key"
            raise PdrtError(f"{self.url} {wants}; give it with --api-key or PDRT_API_KEY")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
