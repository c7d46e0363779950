"""`pdrt prefill`, `decode` and `gateway`: one role in this process, until it is told to stop."""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdrt.cli.child import announce_to, die_with_parent, show_stacks_when_asked
from pdrt.cli.flags import RankArguments, Request, parse_request, print_config
from pdrt.cli.ports import check_port
from pdrt.cli.ranks import start_ranks
from pdrt.cli.security import security_warnings
from pdrt.cli.validate import validate
from pdrt.config import DeviceConfig, GatewayConfig, WorkerConfig
from pdrt.errors import ConfigError
from pdrt.model.cgroup import cpu_quota
from pdrt.model.resources import parse_id_list, rank_count, share_device
from pdrt.observe.logs import name_worker, setup_logging
from pdrt.transfer.liveness import END_FACTOR

if TYPE_CHECKING:
    from pdrt.model.collectives import RankPlace

log = logging.getLogger(__name__)

PORT_MAX = 65535

Announce = Callable[[dict[str, Any]], None]


def run_prefill(arguments: Sequence[str]) -> int:
    return _run_worker("prefill", arguments)


def run_decode(arguments: Sequence[str]) -> int:
    return _run_worker("decode", arguments)


def _run_worker(role: str, arguments: Sequence[str]) -> int:
    request = parse_request(role, WorkerConfig, arguments)
    config = request.config
    validate(config, has_cuda=has_cuda())
    if request.print_config:
        print_config(config)
        return 0
    if request.rank is not None:
        return _run_rank(role, request, request.rank)
    announce = _prepare(role, request)
    devices = _devices(config)
    _check_ports(role, config, len(devices))
    ranks = start_ranks(role, config, len(devices))
    _limit_threads(devices[0])
    with no_garbage():
        if role == "prefill":
            from pdrt.prefill.worker import run
        else:
            from pdrt.decode.worker import run
    own = replace(config, device=devices[0])
    if not ranks.children:
        return run(own, announce)
    return run(own, announce, ranks.children, _place(config, 0, ranks.rendezvous))


def _check_ports(role: str, config: WorkerConfig, ranks: int) -> None:
    check_port("--port", config.host, config.port)
    check_port("--metrics-port", config.host, config.metrics_port)
    if role == "decode" and config.data_port:
        last = config.data_port + ranks - 1
        if last > PORT_MAX:
            raise ConfigError(f"--data-port {config.data_port}: {ranks} ranks would need {last}")
        for port in range(config.data_port, last + 1):
            check_port("--data-port", config.host, port)


def _run_rank(role: str, request: Request[WorkerConfig], arguments: RankArguments) -> int:
    """One of the other ranks of a worker, whose leader has started this process."""
    _prepare(f"{role} rank {arguments.rank}", request)
    end = socket.socket(fileno=arguments.channel_fd)
    end.set_inheritable(False)
    device = _devices(request.config)[arguments.rank]
    _limit_threads(device)
    with no_garbage():
        if role == "prefill":
            from pdrt.prefill.rank_process import run
        else:
            from pdrt.decode.rank_process import run
    place = _place(request.config, arguments.rank, arguments.rendezvous)
    return run(replace(request.config, device=device), place, end)


def _devices(config: WorkerConfig) -> list[DeviceConfig]:
    """What each rank of the worker computes on."""
    return share_device(config.device, os.sched_getaffinity(0), cpu_quota())


def _place(config: WorkerConfig, rank: int, rendezvous: str) -> RankPlace:
    from pdrt.model.collectives import RankPlace

    # What hangs ends its worker earlier; this is for a leader that hangs itself.
    seconds_max = END_FACTOR * config.scheduler.stall_seconds_max
    return RankPlace(rank, rank_count(config.device), rendezvous, seconds_max)


def run_gateway(arguments: Sequence[str]) -> int:
    request = parse_request("gateway", GatewayConfig, arguments)
    config = request.config
    validate(config, has_cuda=has_cuda())
    if request.print_config:
        print_config(config)
        return 0
    announce = _prepare("gateway", request)
    check_port("--port", config.host, config.port)
    check_port("--worker-port", config.worker_host, config.worker_port)
    with no_garbage():
        from pdrt.gateway.server import run
    return run(config, announce)


def _prepare(role: str, request: Request[WorkerConfig] | Request[GatewayConfig]) -> Announce:
    if request.parent_pid is not None:
        die_with_parent(request.parent_pid)
    show_stacks_when_asked()
    _allow_open_files()
    observe = request.config.observe
    setup_logging(role, observe.log_level, observe.log_format)
    for warning in security_warnings(request.config):
        log.warning(warning)
    tell: Announce = _print_announcement
    if request.announce_fd is not None:
        tell = announce_to(request.announce_fd)

    def announce(facts: dict[str, Any]) -> None:
        name_worker(facts["incarnation"])
        tell(facts)

    return announce


def _allow_open_files() -> None:
    """As many as this user may have: a gateway takes one per client, a decode worker five per
    prefill worker. The usual soft limit, 1024, is for programs that call select(2)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def no_garbage() -> Iterator[None]:
    """For imports, which make half a million objects that stay: the collector would go through them
    again and again, 0.7 s of torch's and transformers' 5 s, and then once per full collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _print_announcement(facts: dict[str, Any]) -> None:
    role = facts.get("role", "role")
    rest = "  ".join(f"{key} {value}" for key, value in facts.items() if key != "role")
    print(f"pdrt {role} is up: {rest}", flush=True)


def _limit_threads(device: DeviceConfig) -> None:
    """OpenMP reads its thread count once, when torch is first imported: set it before."""
    threads = device.threads
    if threads is None and device.cpus is not None:
        threads = len(parse_id_list(device.cpus, "--cpus"))
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def has_cuda() -> bool:
    """True if an NVIDIA GPU seems to be here, without importing torch (/dev/dxg is WSL's)."""
    is_wsl_gpu = Path("/dev/dxg").exists() and shutil.which("nvidia-smi") is not None
    return Path("/dev/nvidia0").exists() or is_wsl_gpu
