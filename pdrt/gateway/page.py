"""The web page at `/`: static files of this package, which then ask /status.

Served without an API key, as it holds nothing; what it asks for needs one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "web"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Whatever a model writes into the chat box stays text: nothing inline runs, nothing is loaded
    # from elsewhere. Inline styles are those that the script sets: widths and colours.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for again each time, answered with 304 while nothing has changed.
    "cache-control": "no-cache",
}


class _File(msgspec.Struct, frozen=True):
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    return _File(content, MEDIA_TYPES[path.suffix], etag)


def _route(path: str, file: _File) -> Route:
    async def serve(request: Request) -> Response:
        headers = {**HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return Route(path, serve)


def page_routes() -> list[Route]:
    """A route per file, read once, at start: no request touches the disk."""
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir())}
    index = _route("/", files.pop("index.html"))
    return [index, *(_route(f"/web/{name}", file) for name, file in files.items())]
