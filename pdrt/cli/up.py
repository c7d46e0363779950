"""`pdrt up`: the model, then gateway and workers on this machine, supervised until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pdrt.cli import shortage
from pdrt.cli.children import Children, GaveUp, Launch
from pdrt.cli.cores import allowed_cpus, share_cores
from pdrt.cli.deployment import (
    GATEWAY,
    LOOPBACK,
    Deployment,
    child_environment,
    deployment_of,
    ranks_each,
    served_name,
    visible_gpus,
)
from pdrt.cli.flags import parse_request, print_config
from pdrt.cli.http import get_json, post_json
from pdrt.cli.load import dump_toml
from pdrt.cli.ports import port_of, reserve_port
from pdrt.cli.roles import has_cuda
from pdrt.cli.supervisor import Phase, Supervisor
from pdrt.cli.terminal import Terminal
from pdrt.cli.validate import validate
from pdrt.config import ModelConfig, UpConfig
from pdrt.errors import ConfigError
from pdrt.model.cgroup import available_memory_bytes, cpu_quota
from pdrt.model.resources import named_cpus, parse_id_list

STOP_GRACE_SECONDS = 5.0  # roles get their whole shutdown_timeout before `up` kills them
POLL_SECONDS = 0.1
TELL_SECONDS_MAX = 2.0  # a gateway that is busy for longer learns it by silence anyway
REASONS_AFTER_SECONDS = 10.0  # a start that takes longer says why, whenever the reason changes


def up(arguments: Sequence[str]) -> int:
    request = parse_request("up", UpConfig, arguments)
    config = request.config
    validate(config, has_cuda=has_cuda())
    if request.print_config:
        print_config(config)
        return 0
    with (
        reserve_port("--port", config.host, config.port) as http,
        reserve_port("--worker-port", LOOPBACK, config.worker_port) as dialled,
    ):
        # Ours for as long as we run: workers start beside the gateway that they dial, and one that
        # is restarted comes back where workers and clients look for it.
        config = replace(config, port=port_of(http), worker_port=port_of(dialled))
        terminal = Terminal(is_json=config.observe.log_format == "json")
        try:
            return asyncio.run(_serve(config, _deploy(config, terminal), terminal))
        finally:
            terminal.close()


def _deploy(config: UpConfig, terminal: Terminal) -> Deployment:
    """Who gets what of this machine."""
    workers = config.prefill_workers + config.decode_workers
    cpus, quota, gpus = _cpus(config), cpu_quota(), _gpus(config)
    model = _resolve_model(config.model, terminal)
    if not gpus:
        if (lost := shortage.of_cores(len(cpus), quota, workers)) is not None:
            terminal.say(lost)
        config = _within_memory(config, model, workers, terminal)
    deployment = deployment_of(config, model, share_cores(cpus, quota, workers), gpus)
    for name, worker in deployment.workers.items():
        validate(worker, has_cuda=has_cuda())
        gpu = "" if worker.device.gpus is None else f", GPU {worker.device.gpus}"
        cores = "any core" if worker.device.cpus is None else f"cores {worker.device.cpus}"
        terminal.say(f"{name}: {cores}, threads {worker.device.threads}{gpu}")
    return deployment


def _within_memory(config: UpConfig, model: Path, workers: int, terminal: Terminal) -> UpConfig:
    """With smaller pools where workers would together take more memory than there is."""
    available = available_memory_bytes()
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    share = shortage.pool_share(available, weights, workers)
    if share is None or config.model.kv_cache_memory_bytes is not None:
        return config
    terminal.say(shortage.of_memory(available, share, workers))
    if share <= 0:
        return config
    return replace(config, model=replace(config.model, kv_cache_memory_bytes=share))


def _cpus(config: UpConfig) -> tuple[int, ...]:
    cpus = named_cpus(config.device, ranks_each(config))
    if cpus is None:
        return allowed_cpus()
    if missing := sorted(set(cpus) - set(allowed_cpus())):
        raise ConfigError(f"--cpus {config.device.cpus}: core {missing[0]} cannot be used here")
    return cpus


def _gpus(config: UpConfig) -> tuple[int, ...]:
    if config.device.gpus is not None:
        return parse_id_list(config.device.gpus, "--gpus")
    return visible_gpus() if config.device.device == "cuda" else ()


class Roles:
    """Commands of the roles, and where those that run are to be found."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.url: str | None = None  # of the gateway, once it has announced it
        self._incarnations: dict[str, str] = {}
        """Of the workers that run and have announced themselves."""

    def launch(self, name: str, announce_fd: int) -> Launch:
        """The config goes to the child as a file in memory: nothing is left behind on disk."""
        config_fd = os.memfd_create(f"pdrt-{name}")
        os.write(config_fd, dump_toml(self._deployment.configs[name]).encode())
        argv = [sys.executable, "-m", "pdrt", name.split("-", 1)[0]]
        argv += ["--config", f"/proc/self/fd/{config_fd}"]
        argv += ["--parent-pid", str(os.getpid()), "--announce-fd", str(announce_fd)]
        return Launch(argv, child_environment(), (config_fd,))

    def announced(self, name: str, facts: dict[str, Any]) -> None:
        if name == GATEWAY:
            self.url = str(facts["http"])
        else:
            self._incarnations[name] = str(facts["incarnation"])

    def ended(self, name: str) -> str | None:
        """A life of a child is over; where to tell the gateway, should it not know."""
        incarnation = self._incarnations.pop(name, None)
        if incarnation is None or self.url is None:
            return None
        return f"{self.url}/workers/{incarnation}/gone"


def _tell(url: str, api_key: str | None) -> None:
    """In vain where the gateway knows, as of a worker that left when asked, or does not answer."""
    with contextlib.suppress(OSError):
        post_json(url, api_key, TELL_SECONDS_MAX)


async def _serve(config: UpConfig, deployment: Deployment, terminal: Terminal) -> int:
    roles = Roles(deployment)
    supervisor = Supervisor(
        tuple(deployment.configs),
        config.shutdown_timeout + STOP_GRACE_SECONDS,
        config.hang_seconds_max,
    )
    api_key = next(iter(config.api.api_key), None)

    def ended(name: str) -> None:
        url = roles.ended(name)
        if url is not None and supervisor.phase is Phase.SERVING:
            tasks.create_task(asyncio.to_thread(_tell, url, api_key))

    children = Children(supervisor, roles.launch, roles.announced, ended, terminal)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch_ready(config, roles, children, terminal))
        code = await children.run()
        watch.cancel()
    terminal.say("stopped")
    return code


async def _watch_ready(
    config: UpConfig, roles: Roles, children: Children, terminal: Terminal
) -> None:
    """Says how to use it once a full pair can serve, or gives up after `ready_timeout`."""
    started = time.monotonic()
    said: list[str] = []
    reasons = ["not asked yet"]
    while (age := time.monotonic() - started) < config.ready_timeout:
        reasons = await _reasons_not_ready(roles.url, next(iter(config.api.api_key), None))
        if not reasons:
            terminal.show(_banner(config, roles, age))
            return
        if age >= REASONS_AFTER_SECONDS and reasons != said:
            said = reasons
            terminal.say(f"not ready after {age:.0f} s: {'; '.join(reasons)}")
        await asyncio.sleep(POLL_SECONDS)
    text = f"not ready after {config.ready_timeout:g} s: {'; '.join(reasons)}"
    await children.inbox.put(GaveUp(text, 1))


async def _reasons_not_ready(url: str | None, api_key: str | None) -> list[str]:
    if url is None:
        return ["the gateway has not started"]
    try:
        answer = await asyncio.to_thread(get_json, f"{url}/ready", api_key, 2.0)
    except OSError as error:
        return [f"the gateway does not answer ({error})"]
    reasons = answer.body.get("reasons") if isinstance(answer.body, dict) else None
    if answer.status == 200 and not reasons:
        return []
    return [str(reason) for reason in reasons or [f"/ready answers {answer.status}"]]


def _banner(config: UpConfig, roles: Roles, age_seconds: float) -> str:
    url = reachable(roles.url or "")
    name = served_name(config.model)
    body = msgspec.json.encode(
        {
            "model": name,
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "stream": True,
        }
    ).decode()
    key = "" if not config.api.api_key else '  -H "Authorization: Bearer $PDRT_API_KEY" \\\n'
    other = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    return (
        f"\n{name} is ready at {url} after {age_seconds:.1f} s. Try it:\n\n"
        f"curl -N {url}/v1/chat/completions \\\n"
        f"{key}  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}\n\n"
        f"{command()} status{other} shows workers, rooms and pages. Ctrl-C stops all.\n"
    )


def reachable(url: str) -> str:
    """The URL with an address that can be dialled instead of "any"."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:")


def _resolve_model(config: ModelConfig, terminal: Terminal) -> Path:
    """Once, before the roles start: they would fetch it side by side, and each would refuse by
    itself what the model cannot do."""
    from pdrt.model.fetch import resolve_model
    from pdrt.model.identity import check_length, read_identity, read_json
    from pdrt.model.quantization import check_quantization

    model = resolve_model(config.model, terminal.say, load_format=config.load_format)
    check_length(read_identity(model, config.load_format), config.max_model_len)
    check_quantization(read_json(model / "config.json"), config.quantization)
    return model


def command() -> str:
    """How a user calls `pdrt`: by the name that starts what runs here."""
    checkout = Path(sys.prefix).parent
    if Path(sys.prefix).name == ".venv" and (checkout / "run").exists():
        return "./run" if Path.cwd() == checkout else str(checkout / "run")
    return "pdrt"
