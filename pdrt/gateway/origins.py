"""Which web pages may make a browser act here. Pure but for being an ASGI application.

A browser lets any page post to any address, a gateway on localhost too, and only hides the answer
from it (CORS). What a post does is done by then: workers drained, pages of the pool taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdrt.gateway.errors import ApiError
from pdrt.gateway.http import JsonResponse


def is_foreign(headers: Mapping[str, str], allowed: tuple[str, ...]) -> bool:
    """A web page of another origin that is not among `allowed` is behind this request. Programs
    other than browsers send no `Origin`, and are nobody's page."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return False
    # Right also behind a proxy that changes the host; older browsers do not send it.
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    return urlsplit(origin).netloc != headers.get("host")


class Origins:
    """Refuses posts of foreign pages."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            if is_foreign(headers, self._allowed):
                message = f"Pages of {headers['origin'][:200]} may not use this: see --cors-origin"
                error = ApiError(403, message, code="origin_not_allowed")
                await JsonResponse(error.body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)
