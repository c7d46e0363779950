"""`pdrt up` on this machine: how soon it is ready, what its workers hold, and how its TTFT stands
to the bare executor on the same core."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from rows import Figures
from shapes import model_shape
from standard import Plan, Standard

import pdrt
from pdrt.cli.bench.load import Body, completion_body
from pdrt.cli.cores import allowed_cpus
from pdrt.cli.flags import parse_request
from pdrt.cli.http import get_json
from pdrt.config import DeviceConfig, ModelConfig, UpConfig
from pdrt.errors import PdrtError
from pdrt.kv.layout import KvLayout
from pdrt.model.batch import Row
from pdrt.model.fetch import resolve_model
from pdrt.sampling import Sampling

ROOT = Path(pdrt.__file__).parents[1]
READY_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 60.0
POLL_SECONDS = 0.02
BARE_PROMPTS = {"bare_256": Plan(1, 7, 256, 2), "bare_1500": Plan(1, 5, 1500, 2)}
HOP_MS = 5.0
"""What of the bar on TTFT does not grow with the prompt."""
POOL_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*/memfd:pdrt-kv\b")
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")
CORES = re.compile(r"prefill-0: cores (\S+), threads (\d+)")


def up_config(flags: Sequence[str]) -> UpConfig:
    """What `pdrt up` makes of them.

    Raises:
        ConfigError: it would refuse them.
    """
    return parse_request("up", UpConfig, flags).config


def one_core_each(flags: Sequence[str]) -> list[str]:
    """The flags, and cores for as many workers as they ask for unless they name some."""
    config = up_config(flags)
    if config.device.cpus is not None:
        return list(flags)
    workers = config.prefill_workers + config.decode_workers
    cpus = ",".join(map(str, allowed_cpus()[:workers]))
    return [*flags, "--cpus", cpus]


class Up:
    """One `pdrt up`, as a context: ready when entered, gone when left.

    Attributes:
        url: of its gateway.
        ready_seconds: from its start until a full pair could serve.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.flags = one_core_each(flags)
        self.config = up_config(self.flags)
        self.url = ""
        self.ready_seconds = 0.0

    def __enter__(self) -> Up:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [*command(), "up", *self.flags, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            while not self._is_ready():
                if self._process.poll() is not None or (
                    time.perf_counter() - started > READY_SECONDS_MAX
                ):
                    raise PdrtError(f"pdrt up {shlex.join(self.flags)}:\n{self.text()[-2000:]}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.ready_seconds = time.perf_counter() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        self._log.close()

    @property
    def server(self) -> tuple[str, ...]:
        """As `cpu_times` takes it."""
        return (str(self._process.pid),)

    def text(self) -> str:
        """What it has printed."""
        self._log.seek(0)
        return self._log.read()

    def workers(self) -> dict[str, int]:
        """Process ids of its workers, by role and place: `prefill 0`."""
        found: dict[str, int] = {}
        for pid in sorted(children(self._process.pid)):
            words = _read(pid, "cmdline").split("\0")
            role = next((word for word in words if word in ("prefill", "decode")), None)
            if role is not None:
                found[f"{role} {sum(name.startswith(role) for name in found)}"] = pid
        return found

    def memory(self, layout: KvLayout) -> Figures:
        """Megabytes (10^6) of each worker and its children: resident, its share of what is shared,
        and what is left of the resident beyond weights, held once, and the touched pool."""
        shape = model_shape(resolve_model(self.config.model.model, _silent), layout)
        weights, found = shape.weight_bytes / 1e6, Figures()
        for name, pid in self.workers().items():
            family = [pid, *children(pid)]
            resident, shared = (
                sum(_rollup(each, kind) for each in family) for kind in ("Rss", "Pss")
            )
            pool = pool_mb(_read(pid, "smaps").splitlines())
            found |= {
                f"{name} resident_mb": resident,
                f"{name} proportional_mb": shared,
                f"{name} pool_mb": pool,
                f"{name} beyond_mb": resident - pool - weights,
            }
        beyond = [value for name, value in found.items() if name.endswith("beyond_mb")]
        if len(beyond) < self.config.prefill_workers + self.config.decode_workers:
            raise PdrtError("not every worker's process was found")
        return {**found, "weights_mb": weights, "worker_max_mb": max(beyond)}

    def _is_ready(self) -> bool:
        try:
            return get_json(f"{self.url}/ready", None, 2.0).status == 200
        except OSError:
            return False


class Bare:
    """The executor alone, on the core of the first prefill worker, which is idle meanwhile."""

    def __init__(self, up: Up, dtype: str) -> None:
        """`dtype`: what the workers serve.

        Raises:
            PdrtError: it cannot be loaded.
        """
        from pdrt.model.executor import Executor

        found = CORES.search(up.text())
        if found is None:
            raise PdrtError("which core the prefill worker has was not said: it has no core alone")
        device = DeviceConfig(device="cpu", cpus=found[1], threads=int(found[2]))
        model = ModelConfig(model=up.config.model.model, dtype=dtype)  # type: ignore[arg-type]
        self._executor = Executor.load(model, device, _silent)
        self._chunk = up.config.scheduler.max_num_batched_tokens

    def close(self) -> None:
        self._executor.close()

    def prefill(self, prompt: list[int], chunk: int) -> float:
        """Seconds of all its steps."""
        return sum(self._executor.step_blocking([row]).seconds for row in self._rows(prompt, chunk))

    def _rows(self, prompt: list[int], chunk: int) -> Iterator[Row]:
        pages = list(range(self._executor.layout.pages_for(len(prompt))))
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            is_last = start + len(part) == len(prompt)
            sampling = Sampling(max_tokens=1, temperature=0.0) if is_last else None
            yield Row(token_ids=part, start=start, pages=pages, sampling=sampling)

    async def compare(self, standard: Standard, bodies: Sequence[Body]) -> Figures:
        """TTFT of each, beside its prompt in one step and in the service's chunks; in turn."""
        whole, chunked, ttfts = [], [], []
        for body in bodies:
            sample = await standard.send(body)
            if sample.error is not None:
                raise PdrtError(f"a request failed: {sample.error}")
            prompt = body["prompt"]
            ttfts.append(sample.ttft)
            whole.append(await asyncio.to_thread(self.prefill, prompt, len(prompt)))
            chunked.append(await asyncio.to_thread(self.prefill, prompt, self._chunk))
        # The first warms up. The faster way of the executor is what the service is held against.
        ttft, in_one, in_chunks = (1e3 * statistics.median(t[1:]) for t in (ttfts, whole, chunked))
        least = min(in_one, in_chunks)
        return {
            "ttft_ms": ttft,
            "executor_ms": in_one,
            "executor_chunked_ms": in_chunks,
            "ttft_to_executor": (ttft - HOP_MS) / least,
        }


def bodies(standard: Standard, name: str, attempt: int) -> list[Body]:
    """Prompts of token ids that were not sent before."""
    plan = BARE_PROMPTS[name]
    draw, shape = random.Random(f"{name} {attempt}"), standard.shape(plan)
    return [completion_body(shape, draw) for _ in range(plan.requests + 1)]


def stop_when_told() -> None:
    """SIGTERM ends this process as Ctrl-C does: through the contexts that stop what it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def command() -> list[str]:
    """How a user starts pdrt here."""
    if Path(sys.prefix) == ROOT / ".venv":
        return [str(ROOT / "run")]
    return [sys.executable, "-m", "pdrt"]


def children(pid: int) -> list[int]:
    """Its children, and theirs."""
    found: list[int] = []
    for task in _tasks(pid):
        for child in map(int, _read(pid, f"task/{task}/children").split()):
            found += [child, *children(child)]
    return found


def pool_mb(smaps: Sequence[str]) -> float:
    """What of KV pools is resident in a process, its own and those of others that it maps: of the
    lines of its smaps. Pure."""
    kilobytes, is_pool = 0, False
    for line in smaps:
        if MAPPING.match(line):
            is_pool = POOL_MAPPING.match(line) is not None
        elif is_pool and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes * 1024 / 1e6


def _rollup(pid: int, kind: str) -> float:
    for line in _read(pid, "smaps_rollup").splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _silent(text: str) -> None:
    pass
