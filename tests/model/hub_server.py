"""A Hugging Face hub in miniature: the four requests that its client makes for a snapshot, served
from folders on the loopback interface. Import as `tests.model.hub_server`."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40


class Hub:
    """Serves `repositories` (id to folder); those in `gated` to nobody. Notes what was fetched."""

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.repositories = repositories
        self.gated = gated
        self.fetched: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a request."""
        path = path.partition("?")[0]
        for repository, folder in self.repositories.items():
            if path.startswith((f"/api/models/{repository}", f"/{repository}/")):
                if repository in self.gated:
                    return 403, {"X-Error-Code": "GatedRepo"}, b""
                return self._of(repository, folder, path)
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _of(self, repository: str, folder: Path, path: str) -> tuple[int, dict[str, str], bytes]:
        if path.startswith(f"/api/models/{repository}/tree/"):
            return 200, {}, json.dumps([entry(file) for file in sorted(folder.iterdir())]).encode()
        if path.startswith("/api/"):
            return 200, {}, json.dumps({"id": repository, "sha": COMMIT, "siblings": []}).encode()
        file = folder / path.rpartition("/")[2]
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        self.fetched.append(file.name)
        headers = {"ETag": f'"{blob_id(file)}"', "X-Repo-Commit": COMMIT}
        return 200, headers, file.read_bytes()


def blob_id(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def entry(file: Path) -> dict[str, object]:
    """How the hub lists a file."""
    size = file.stat().st_size
    return {"type": "file", "path": file.name, "size": size, "oid": blob_id(file)}


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at `hub.url` until left."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
