"""`pdrt up` on one GPU, and clients of the standard library: nothing else needs to be installed on
the machine."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 120.0
POLL_SECONDS = 0.05


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Deployment:
    """One gateway, one prefill worker and one decode worker, as a context."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.port = free_port()
        self._log = (folder / "up.log").open("w+")
        command = [sys.executable, "-m", "pdrt", "up", "--model", str(model), "--gpus", "0"]
        command += ["--port", str(self.port), "--worker-port", str(free_port()), *flags]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PDRT_")}
        self._up = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )

    def __enter__(self) -> Deployment:
        try:
            self.wait(lambda: self.get("/ready").get("reasons") == [], "ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._up.terminate()
        try:
            self._up.wait(HANG_SECONDS)
        finally:
            self._up.kill()
            self._log.close()

    @property
    def pid(self) -> int:
        return self._up.pid

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait(self, look: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not look():
            assert self._up.poll() is None, f"pdrt up has ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.log()[-8000:]}"
            time.sleep(POLL_SECONDS)

    # Clients

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)

    def get(self, path: str) -> dict[str, Any]:
        """Empty when nobody answers."""
        connection = self.connect()
        try:
            connection.request("GET", path)
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def ask(
        self, connection: http.client.HTTPConnection, prompt: Sequence[int], **settings: Any
    ) -> http.client.HTTPResponse:
        """POST /v1/completions."""
        body = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True, **settings}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection.getresponse()

    def complete(self, prompt: Sequence[int], count: int, **settings: Any) -> list[int]:
        """Token ids of a whole answer."""
        connection = self.connect()
        try:
            asked = {"max_tokens": count, "return_token_ids": True, **settings}
            answer = self.ask(connection, prompt, **asked)
            text = answer.read()
            assert answer.status == 200, text
            tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
            return tokens
        finally:
            connection.close()

    # Being whole

    def troubles(self) -> list[str]:
        """What an idle deployment must not have."""
        status = self.get("/status")
        workers = status.get("workers", [])
        if len(workers) != 2:
            return [f"{len(workers)} workers"]
        found = []
        for worker in workers:
            name, inner = worker["role"], worker["status"] or {}
            pages = inner.get("pages", {})
            if pages.get("free", 0) + pages.get("cache", 0) != inner.get("pages_total"):
                found.append(f"{name}: pages {pages}")
            for key in ("leases_total", "rooms_total", "quarantined_pages", "queued", "running"):
                if inner.get(key):
                    found.append(f"{name}: {key} {inner[key]}")
        return found or self._broken()

    def _broken(self) -> list[str]:
        connection = self.connect()
        try:
            connection.request("GET", "/debug/check")
            answer = connection.getresponse()
            text = answer.read().decode()
            return [] if answer.status == 200 else [text]
        finally:
            connection.close()

    def wait_whole(self) -> None:
        """Both pools are whole again, and every invariant holds."""
        self.wait(lambda: not self.troubles(), "both pools to be whole")

    def workers(self) -> dict[int, str]:
        """Roles by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, UnicodeDecodeError):
                continue
            if parent == self.pid and "pdrt" in command:
                found[int(entry.name)] = command[command.index("pdrt") + 1]
        return found
