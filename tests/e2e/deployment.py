"""Real `python -m pdrt …` processes: started, watched, killed, and looked for afterwards.

Every process carries a mark in its environment that its own children inherit, so that what is
left behind is found whoever its parent is by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 300.0
"""Nothing here waits longer. A bound on hangs, not a claim on speed."""
POLL_SECONDS = 0.05
MARK = "E2E_DEPLOYMENT"
CPUS = sorted(os.sched_getaffinity(0))
REST_TOKENS = 3000
"""Still to be computed of a prompt that something is to happen in the middle of: some tenths of a
second."""
Value = TypeVar("Value")
Sample = tuple[str, dict[str, str], float]
"""Name, labels and value of a metric."""

_EXEC = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, "-m", "pdrt", *sys.argv[1:]])
"""
"""`pdrt`, ended by the kernel with the thread that started it: with the tests, however they end.
So only the main thread starts processes."""
live: list[Deployment] = []
"""Deployments whose logs are shown when a test fails."""


def free_port() -> int:
    """One that nobody gets by chance before it is used, or while a gateway is started anew: below
    those that the kernel gives to whoever asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait(look: Callable[[], Value | None], what: str) -> Value:
    """The first answer that is true. Raises AssertionError after `HANG_SECONDS`."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(POLL_SECONDS)


async def until(look: Callable[[], Value | None], what: str) -> Value:
    """`wait`, while the event loop goes on."""
    return await asyncio.to_thread(wait, look, what)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Process:
    """One `python -m pdrt …` and what it has printed."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        folder: Path,
        mark: str,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: a command that becomes the process, such as `ip netns exec`."""
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._log = (folder / f"{name}.log").open("a+")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PDRT_")}
        self._popen = subprocess.Popen(
            [*prefix, sys.executable, "-c", _EXEC, *arguments],
            env={
                **kept,
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                "TMPDIR": str(self.temporary),
                MARK: mark,
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self.temporary,
        )
        self.pid = self._popen.pid

    def text(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait_for(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Matches in the log, once there are `count`."""

        def look() -> list[re.Match[str]] | None:
            found = list(re.finditer(pattern, self.text()))
            is_over = self._popen.poll() is not None
            assert len(found) >= count or not is_over, f"{self.name} ended:\n{self.text()}"
            return found if len(found) >= count else None

        return wait(look, f"{pattern!r} of {self.name}")

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def incarnation(self) -> str:
        """Of a worker, once it is up."""
        return self.wait_for(r"is up: .*incarnation ([0-9a-f]{16})")[0][1]

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self._popen.wait(HANG_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._popen.kill()
        self.wait()

    def close(self) -> None:
        self.kill()
        self._log.close()


class Deployment:
    """One gateway (or `pdrt up`) and its workers, as a context that leaves nothing behind."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.model = model
        self.name = Path(model).name
        self.gateway_host = "127.0.0.1"
        self.port = free_port()
        self.worker_port = free_port()
        self.processes: dict[str, Process] = {}
        self._serial = 0
        self._mark = uuid.uuid4().hex
        self._cpus = itertools.cycle(CPUS)
        self._http = httpx2.Client(timeout=HANG_SECONDS, trust_env=False)

    def __enter__(self) -> Deployment:
        live.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self.processes.values():
                process.close()
            self.assert_nothing_left()
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            self._http.close()
            live.remove(self)

    # Starting

    def run(self, name: str, *arguments: str) -> Process:
        """Any command. A name that is in use is that of its successor from now on."""
        if (before := self.processes.get(name)) is not None:
            before.close()
        self._serial += 1
        log = f"{name}.{self._serial}"
        prefix = self.prefix_of(name)
        process = Process(log, list(arguments), self.folder, self._mark, prefix)
        self.processes[name] = process
        return process

    def prefix_of(self, name: str) -> Sequence[str]:
        """What a process is started by, beside Python."""
        return ()

    def up(self, *flags: str) -> Process:
        arguments = ["--model", self.model, "--port", str(self.port)]
        arguments += ["--worker-port", str(self.worker_port), "--threads", "1"]
        return self.run("up", "up", *arguments, *flags)

    def gateway(self, name: str = "gateway", *flags: str) -> Process:
        ports = ["--port", str(self.port), "--worker-port", str(self.worker_port)]
        return self.run(name, "gateway", "--model", self.model, *ports, *flags)

    def prefill(self, name: str, *flags: str) -> Process:
        return self._worker("prefill", name, *flags)

    def decode(self, name: str, *flags: str) -> Process:
        return self._worker("decode", name, *flags)

    def _worker(self, role: str, name: str, *flags: str) -> Process:
        arguments = [role, "--threads", "1", "--cpus", str(next(self._cpus))]
        arguments += ["--gateway", f"{self.gateway_host}:{self.worker_port}"]
        if "--model" not in flags:
            arguments += ["--model", self.model]
        return self.run(name, *arguments, *flags)

    def pid_of(self, role: str) -> int | None:
        """Of the one process of this role under `pdrt up`."""
        return next((pid for pid in self.pids() if role in _arguments(pid)), None)

    # Looking

    @property
    def url(self) -> str:
        return f"http://{self.gateway_host}:{self.port}"

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """To be closed by the caller (`async with`)."""
        settings = {"timeout": HANG_SECONDS, "max_retries": 0, **options}
        http = httpx2.AsyncClient(
            trust_env=False,
            timeout=settings["timeout"],
            limits=httpx2.Limits(max_connections=None),
        )
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", http_client=http, **settings
        )

    def get(self, path: str) -> httpx2.Response | None:
        """None when nothing answers."""
        try:
            return self._http.get(self.url + path)
        except httpx2.TransportError:
            return None

    def status(self) -> dict[str, Any] | None:
        answer = self.get("/status")
        return None if answer is None else answer.json()

    def workers(self, role: str | None = None) -> list[dict[str, Any]]:
        """Of the status: those that are not lost."""
        found = (self.status() or {"workers": []})["workers"]
        return [w for w in found if w["state"] != "lost" and role in (None, w["role"])]

    def reports(self, role: str) -> list[dict[str, Any]]:
        """What workers say of themselves, once each of them has answered in time."""

        def look() -> list[dict[str, Any]] | None:
            found = [worker["status"] for worker in self.workers(role)]
            return None if None in found else found

        return wait(look, f"reports of {role}")

    def reasons(self) -> list[str] | None:
        """Why it is not ready; empty when it is; None when nobody answers."""
        answer = self.get("/ready")
        return None if answer is None else answer.json()["reasons"]

    def is_ready(self) -> bool:
        """Raises AssertionError when `pdrt up` has ended: it never will be."""
        up = self.processes.get("up")
        assert up is None or up.is_running, up.text()
        return self.reasons() == []

    def worker(self, name: str) -> dict[str, Any] | None:
        """The status of a process of ours."""
        wanted = self.processes[name].incarnation
        return next((w for w in self.workers() if w["worker"] == wanted), None)

    def in_prefill(self) -> str | None:
        """The incarnation of a prefill worker that is in the middle of a long prompt."""
        for worker in self.workers("prefill"):
            for room in (worker["status"] or {"rooms": []})["rooms"]:
                rest = room["tokens"] - room["computed"]
                if room["state"] == "open" and room["computed"] and rest >= REST_TOKENS:
                    return str(worker["worker"])
        return None

    def is_complete(self) -> bool:
        """Exactly the workers that we run, each decode worker paired with each prefill worker."""
        mine = {p.incarnation for n, p in self.processes.items() if n[0] in "pd" and p.is_running}
        workers = self.workers()
        endpoints = {w["endpoint"] for w in workers if w["role"] == "prefill"}
        return (
            {w["worker"] for w in workers} == mine
            and all(set(w["paired"]) == endpoints for w in workers if w["role"] == "decode")
            and self.is_ready()
        )

    def metrics(self) -> list[Sample]:
        """Samples of the whole deployment: once every worker has answered in time, as a scrape
        leaves out those that have not."""
        return wait(self._scrape, "metrics of every worker")

    def _scrape(self) -> list[Sample] | None:
        answer = self.get("/metrics")
        assert answer is not None and answer.status_code == 200
        samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        ]
        known = sum(v for n, at, v in samples if n == "pdrt_workers" and at["state"] != "lost")
        answered = {labels["worker"] for _, labels, _ in samples if labels["role"] != "gateway"}
        return samples if len(answered) == known else None

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples with these labels."""
        return sum(
            value
            for found, theirs, value in self.metrics()
            if found == name and labels.items() <= theirs.items()
        )

    # Being whole

    def wait_ready(self) -> None:
        wait(self.is_ready, "ready")

    def drain(self, name: str) -> None:
        """Ask a process of ours to leave, over HTTP."""
        answer = self._http.post(f"{self.url}/workers/{self.processes[name].incarnation}/drain")
        assert answer.status_code == 200, answer.text

    def troubles(self) -> list[str]:
        """What an idle deployment must not have: pages that are not free, leases, rooms,
        requests, broken invariants."""
        status = self.status()
        if status is None:
            return ["no answer"]
        found = [f"gateway: {n} {status['gateway'][n]}" for n in ("requests", "attempts")]
        troubles = [text for text in found if not text.endswith(" 0")]
        for worker in status["workers"]:
            if worker["state"] == "lost":
                continue
            name, inner = f"{worker['role']} {worker['worker']}", worker["status"]
            if inner is None:
                troubles.append(f"{name}: no report")
                continue
            if inner["pages"]["free"] + inner["pages"]["cache"] != inner["pages_total"]:
                troubles.append(f"{name}: pages {inner['pages']}")
            for key in ("leases_total", "rooms_total", "quarantined_pages", "queued", "running"):
                if inner.get(key):
                    troubles.append(f"{name}: {key} {inner[key]}")
        return troubles or self._broken()

    def _broken(self) -> list[str]:
        answer = self.get("/debug/check")
        if answer is None or answer.status_code != 200:
            return [f"/debug/check: {None if answer is None else answer.text}"]
        troubles = []
        for name, labels, value in self.metrics():
            is_held = name == "pdrt_pages" and labels["owner"] not in ("free", "cache")
            is_count = name in ("pdrt_leases", "pdrt_rooms", "pdrt_quarantined_pages", "pdrt_queue")
            if value and (is_held or is_count):
                troubles.append(f"{name} {labels}: {value}")
        return troubles

    def wait_whole(self) -> None:
        """Until both pools are whole and every invariant holds."""
        troubles: list[str] = []

        def look() -> bool:
            troubles[:] = self.troubles()
            return not troubles

        try:
            wait(look, "both pools to be whole")
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(troubles)}") from None

    # Leaving nothing behind

    def pids(self) -> list[int]:
        """Living processes of this deployment."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted in environment and is_alive(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def assert_holds_nothing_named(self) -> None:
        """No process has a file in /dev/shm or a socket with a path: nothing to leave behind."""
        named = _unix_sockets()
        for pid in self.pids():
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    target = os.readlink(entry)
                except OSError:
                    continue
                assert not target.startswith("/dev/shm/"), (pid, target)
                assert target not in named, (pid, named[target])

    def assert_nothing_left(self) -> None:
        """No process, and no file in the folder for temporary ones."""
        wait(lambda: not self.pids(), f"the end of {self.pids()}")
        found = (self.folder / "tmp").rglob("*")
        left = [str(path) for path in found if not (_is_probe(path) or _is_torchs(path))]
        assert not left, f"left behind: {left}"

    def logs(self) -> str:
        """The newest lines of every process."""
        parts = []
        for process in self.processes.values():
            lines = process.text().splitlines()[-40:]
            parts.append("\n".join([f"--- {process.name} ({len(lines)} lines)", *lines]))
        return "\n".join(parts)


def _is_probe(path: Path) -> bool:
    """`tempfile` tries a folder with a file of eight random characters, and `import torch` asks it
    for one (torch/_inductor/runtime/cache_dir_utils.py): SIGKILL at that moment leaves the file."""
    is_named_so = re.fullmatch("[a-z0-9_]{8}", path.name) is not None
    return is_named_so and path.is_file() and path.read_bytes() in (b"", b"blat")


def _is_torchs(path: Path) -> bool:
    """Importing transformers makes torch create an empty folder for a compiler's cache, here unless
    this process has imported it before: then its TORCHINDUCTOR_CACHE_DIR is handed down."""
    return path.name.startswith("torchinductor_") and path.is_dir() and not any(path.iterdir())


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _unix_sockets() -> dict[str, str]:
    """`socket:[inode]` to the path or abstract name, of those that have one."""
    named = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            named[f"socket:[{fields[6]}]"] = fields[7]
    return named


def run_command(*arguments: str, timeout: float = HANG_SECONDS) -> tuple[int, str, str]:
    """A command that ends by itself: exit code, stdout, stderr."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PDRT_")}
    done = subprocess.run(
        [sys.executable, "-m", "pdrt", *arguments],
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def run_status(deployment: Deployment) -> tuple[int, dict[str, Any]]:
    """`pdrt status --json`."""
    code, output, _ = run_command("status", "--json", "--url", deployment.url)
    return code, json.loads(output)
