"""The gateway process: HTTP server, worker channel, one timer, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvloop

from pdrt.config import GatewayConfig
from pdrt.errors import ConfigError
from pdrt.gateway.app import build_app
from pdrt.gateway.hub import Hub
from pdrt.gateway.served_model import ServedModel, load_served_model
from pdrt.ids import new_incarnation, short
from pdrt.model.resources import parse_id_list
from pdrt.observe.http_server import HttpServer
from pdrt.protocol.clock import TICK_SECONDS
from pdrt.transfer.channel import RouterChannel
from pdrt.transfer.cluster_key import read_key

log = logging.getLogger("pdrt.gateway")

Announce = Callable[[dict[str, Any]], None]

SEND_BUFFER_BYTES = 64 * 1024
"""Of each client's connection. The kernel would let it grow to megabytes: tens of thousands of
tokens that nobody has read and that look taken. A stream needs a few KB per second."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections: they close them, not we, so that no
request meets a closing one."""
LAST_WORDS_SECONDS = 2.0
"""For cancels to be answered and last events to be read, at the end of a shutdown."""
EXIT_STOPPED = 0
EXIT_BROKEN = 1
"""A broken invariant or an unexpected exception; a successor starts empty."""


def run(config: GatewayConfig, announce: Announce) -> int:
    """Serve until SIGTERM or SIGINT, or until something breaks; returns the exit status.

    `announce` is called once, with the addresses, when clients and workers can connect.

    Raises:
        ConfigError: an address cannot be bound, or a core not be used.
        ModelError: the model has no tokenizer, or cannot be served.
    """
    model, digests = load_served_model(config)
    _keep_to(config.cpus)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, model, digests, announce))


def _keep_to(cpus: str | None) -> None:
    """All threads that start from now on, and this one."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, parse_id_list(cpus, "--cpus"))
    except OSError as error:
        raise ConfigError(f"--cpus {cpus}: {error.strerror}; name cores of this machine") from error


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Stop:
    """SIGTERM and SIGINT: the first asks for a graceful stop, the second for a quick one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_urgent = False
        self._loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            self._loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        self.is_urgent = self.asked.is_set()
        self.asked.set()

    def close(self) -> None:
        for number in _STOP_SIGNALS:
            self._loop.remove_signal_handler(number)


async def serve(
    config: GatewayConfig, model: ServedModel, digests: tuple[str, ...], announce: Announce
) -> int:
    """Everything that `run` does on the loop."""
    broken = _watch_callbacks()
    code = EXIT_BROKEN
    incarnation = new_incarnation()
    listener = bind_http(config.host, config.port)
    try:
        channel = RouterChannel(
            config.worker_host,
            config.worker_port,
            # No frame is read before the loop turns, and then there is a hub.
            lambda peer, frame: hub.on_frame(peer, frame),  # noqa: PLW0108
            config.protocol.frame_bytes_max,
            read_key(config.security),
        )
    except ConfigError as taken:
        listener.close()
        raise ConfigError(f"{taken}; choose another --worker-port") from taken
    hub = Hub(config, digests, incarnation, channel.send)
    hub.read_all = channel.drain
    channel.on_refused = lambda failure: hub.metrics.count_refused_peer(failure.value)
    channel.on_disconnected = hub.on_disconnected
    server = HttpServer(
        build_app(hub, model, config),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(LAST_WORDS_SECONDS),
    )
    stop = _Stop()
    try:
        async with asyncio.TaskGroup() as group:
            http = group.create_task(server.serve(sockets=[listener]), name="http")
            # They end with an exception, or by us.
            tick = group.create_task(_tick(hub, channel), name="tick")
            endless = [tick, group.create_task(_raise(broken))]
            for task in (http, tick):
                task.add_done_callback(lambda task: _note_end(task, server, broken))
            await server.accepting.wait()
            announce(
                {
                    "role": "gateway",
                    "http": _url(listener),
                    "workers": f"{channel.host}:{channel.port}",
                    "incarnation": short(incarnation),
                }
            )
            await stop.asked.wait()
            await _finish(hub, config.shutdown_timeout, stop)
            server.should_exit = True
            await http
            for each in endless:
                each.cancel()
        code = EXIT_STOPPED
    except* Exception as errors:
        for error in errors.exceptions:
            log.error("gateway broke", exc_info=error)
    finally:
        stop.close()
        channel.close()
        listener.close()
        model.close()
        hub.tracer.close()
    return code


def _watch_callbacks() -> asyncio.Future[None]:
    """Fails with the first exception of a callback, which nothing above it could handle: the rest
    of what it had to do is lost, so that requests would wait for ever."""
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # What goes wrong on one client's connection ends that connection and nothing else.
        is_ours = not isinstance(error, OSError) and "transport" not in context
        if not isinstance(error, Exception) or not is_ours:
            loop.default_exception_handler(context)
        elif not broken.done():
            broken.set_exception(error)

    loop.set_exception_handler(on_exception)
    return broken


async def _raise(broken: asyncio.Future[None]) -> None:
    await broken


def _note_end(task: asyncio.Task[None], server: HttpServer, broken: asyncio.Future[None]) -> None:
    """What ends without a word: by itself, or because what it waited for was cancelled, which
    a TaskGroup takes for a wish."""
    is_wanted = server.should_exit or task.cancelling()
    is_silent = task.cancelled() or task.exception() is None
    if is_silent and not is_wanted and not broken.done():
        broken.set_exception(AssertionError(f"the task {task.get_name()!r} has ended by itself"))


async def _tick(hub: Hub, channel: RouterChannel) -> None:
    """The one timer."""
    while True:
        await asyncio.sleep(TICK_SECONDS)
        channel.drain()
        hub.on_tick()


async def _finish(hub: Hub, seconds_max: float, stop: _Stop) -> None:
    """Refuse new requests, let the others end for a while, then end them."""
    hub.is_draining = True
    log.info("shutting down", extra={"requests": hub.streams})
    await _wait(lambda: not hub.streams or stop.is_urgent, seconds_max)
    hub.shut_down()
    await _wait(lambda: hub.is_quiet or stop.is_urgent, LAST_WORDS_SECONDS)


async def _wait(is_over: Callable[[], bool], seconds_max: float) -> None:
    for _ in range(int(seconds_max / TICK_SECONDS)):
        if is_over():
            return
        await asyncio.sleep(TICK_SECONDS)


def bind_http(host: str, port: int) -> socket.socket:
    """A bound TCP socket for clients, not listening yet.

    Raises:
        ConfigError: the address cannot be bound; names it and its flags.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, socket.AF_INET, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot bind to {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from error
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"
