"""Stand-ins for the roles, without model or torch: put this folder on PYTHONPATH and
`pdrt prefill|decode|gateway` run these instead. Python imports a sitecustomize at its start.

The gateway answers /ready and /status; a worker connects to the gateway's worker port, so that
readiness needs both. The model is a folder beside this file. STAND_IN_FAIL names a role that
refuses its configuration.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import types
from pathlib import Path


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def _gateway(config, announce) -> int:
    workers = set()

    async def on_worker(reader, writer) -> None:
        workers.add(writer)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        workers.discard(writer)
        writer.close()

    async def on_request(reader, writer) -> None:
        method, path = (await reader.readline()).decode().split()[:2]
        if method == "POST":
            print(f"posted {path}", flush=True)
        is_ready = len(workers) >= 2
        reasons = [] if is_ready else [f"{len(workers)} of 2 workers"]
        body = json.dumps({"ready": is_ready, "reasons": reasons, "workers": []}).encode()
        status = 200 if is_ready or path == "/status" else 503
        writer.write(b"HTTP/1.0 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    stop = _stop_event()
    inner = await asyncio.start_server(on_worker, config.worker_host, config.worker_port)
    outer = await asyncio.start_server(on_request, config.host, config.port)
    http, dial = (server.sockets[0].getsockname()[1] for server in (outer, inner))
    announce(
        {
            "role": "gateway",
            "http": f"http://{config.host}:{http}",
            "workers": f"{config.worker_host}:{dial}",
            "incarnation": "00000000000000aa",
        }
    )
    print(f"pid={os.getpid()} worker_port={dial}", flush=True)
    await stop.wait()
    return 0


async def _worker(role, config, announce) -> int:
    from pdrt.errors import ConfigError

    if os.environ.get("STAND_IN_FAIL") == role:
        raise ConfigError("--stand-in: refused")
    stop = _stop_event()
    incarnation = f"{os.getpid():016x}"
    announce({"role": role, "endpoint": "tcp://127.0.0.1:1", "incarnation": incarnation})
    threads = os.environ.get("OMP_NUM_THREADS")
    print(f"pid={os.getpid()} cpus={config.device.cpus} threads={threads}", flush=True)
    host, port = config.gateway[0].split(":")
    while not stop.is_set():
        with contextlib.suppress(OSError):
            reader, _ = await asyncio.open_connection(host, int(port))
            lost = asyncio.ensure_future(reader.read())
            told = asyncio.ensure_future(stop.wait())
            await asyncio.wait({lost, told}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.02)
    return 0


def _module(name: str, **members) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def _runner(role: str):
    return lambda config, announce: asyncio.run(_worker(role, config, announce))


_module("pdrt.gateway.server", run=lambda config, announce: asyncio.run(_gateway(config, announce)))
_module("pdrt.prefill.worker", run=_runner("prefill"))
_module("pdrt.decode.worker", run=_runner("decode"))
_module(
    "pdrt.model.fetch",
    resolve_model=lambda name, progress, load_format="auto": Path(__file__).parent / "model",
)
