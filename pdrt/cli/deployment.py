"""What `pdrt up` starts: one config per role, made from its own. Pure, but for looking at paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pdrt.cli.cores import Share, ranges
from pdrt.cli.options import options_of
from pdrt.config import DeviceConfig, GatewayConfig, ModelConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError
from pdrt.model.resources import parse_id_list

GATEWAY = "gateway"
LOOPBACK = "127.0.0.1"  # where workers and gateway meet; only the HTTP port follows --host

Config = TypeVar("Config", bound=msgspec.Struct)


class Deployment(msgspec.Struct, frozen=True):
    """Configs by the names that logs show."""

    gateway: GatewayConfig
    workers: dict[str, WorkerConfig]

    @property
    def configs(self) -> dict[str, GatewayConfig | WorkerConfig]:
        return {GATEWAY: self.gateway, **self.workers}


def deployment_of(
    up: UpConfig, model: Path, shares: Sequence[Share], gpus: Sequence[int]
) -> Deployment:
    """`up` has ports of its own. `model`: where its files are. `shares`: one per worker. `gpus`:
    empty without CUDA; workers take them in turn, one for each of their ranks, and those that meet
    on one split the memory that `up` may use of it."""
    names = [f"prefill-{n}" for n in range(up.prefill_workers)]
    names += [f"decode-{n}" for n in range(up.decode_workers)]
    assert len(shares) == len(names)
    ranks = ranks_each(up)
    _check_gpus(up, len(names), ranks)
    dealt = [_deal(gpus, worker * ranks, ranks) for worker in range(len(names))]
    crowd = Counter(gpu for mine in dealt for gpu in mine)
    named = replace(up.model, model=str(model), served_model_name=served_name(up.model))
    workers: dict[str, WorkerConfig] = {}
    for name, share, mine in zip(names, shares, dealt, strict=True):
        memory = up.model.gpu_memory_utilization / max((crowd[gpu] for gpu in mine), default=1)
        workers[name] = replace(
            _shared_fields(up, WorkerConfig),
            gateway=(f"{LOOPBACK}:{up.worker_port}",),
            host=LOOPBACK,
            port=0,
            model=replace(named, gpu_memory_utilization=memory),
            device=_device(up.device, share, mine, ranks),
        )
    # On whichever of their cores has time: beside prefill alone, which is what a burst waits for,
    # it made eight clients' first tokens some 8 % later.
    cores = {cpu for share in shares for cpu in share.cpus}
    gateway = replace(
        _shared_fields(up, GatewayConfig),
        cpus=ranges(tuple(sorted(cores))) if cores else None,
        worker_host=LOOPBACK,
        model=str(model),
        served_model_name=named.served_model_name,
    )
    return Deployment(gateway, workers)


def _shared_fields(up: UpConfig, config_type: type[Config]) -> Config:
    """The role's config with every field that `up` has too; `model` means different things."""
    names = {field.name for field in msgspec.structs.fields(config_type)} - {"model"}
    return config_type(**{name: getattr(up, name) for name in names if hasattr(up, name)})


def ranks_each(up: UpConfig) -> int:
    """Ranks of each worker: as told, else as many as use all GPUs that are named, where that comes
    out even."""
    if up.device.tensor_parallel_size is not None:
        return up.device.tensor_parallel_size
    if up.device.gpus is None:
        return 1
    ranks, left = divmod(
        len(parse_id_list(up.device.gpus, "--gpus")), up.prefill_workers + up.decode_workers
    )
    return 1 if left else ranks


def _check_gpus(up: UpConfig, workers: int, ranks: int) -> None:
    """Raises ConfigError where devices are named that nobody would use."""
    if up.device.gpus is None:
        return
    named, used = len(parse_id_list(up.device.gpus, "--gpus")), workers * ranks
    if named > used:
        raise ConfigError(
            f"--gpus {up.device.gpus} names {named} devices, and {workers} workers of {ranks} "
            f"ranks use {used}: name {used}, or as many for each worker; or give a larger "
            "--tensor-parallel-size (ranks of each worker), more --prefill-workers or "
            "--decode-workers"
        )


def _deal(gpus: Sequence[int], first: int, count: int) -> tuple[int, ...]:
    """`count` of them from place `first` on, beginning anew after the last one.

    Raises:
        ConfigError: a worker would get one twice.
    """
    if gpus and len(gpus) < count:
        raise ConfigError(
            f"--tensor-parallel-size {count}: {len(gpus)} GPUs are here, and a rank takes one"
        )
    return tuple(gpus[(first + n) % len(gpus)] for n in range(count)) if gpus else ()


def _device(device: DeviceConfig, share: Share, gpus: Sequence[int], ranks: int) -> DeviceConfig:
    cpus = ranges(share.cpus) if share.cpus else None
    if cpus is not None and len(share.cpus) < ranks:
        # Ranks that have no core each take turns on all that `up` has, not on this worker's few.
        cpus = device.cpus
    return replace(
        device,
        gpus=",".join(map(str, gpus)) if gpus else None,
        cpus=cpus,
        threads=device.threads or share.threads,
    )


def served_name(model: ModelConfig) -> str:
    """What clients call the model: as told, else the directory's or file's name, else the name."""
    if model.served_model_name is not None:
        return model.served_model_name
    path = Path(model.model)
    return path.resolve().name if path.exists() else model.model


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """CUDA's numbers of the GPUs this process may use, told without importing torch."""
    if (mask := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(range(len([entry for entry in mask.split(",") if entry.strip()])))
    nodes = [path for path in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(range(max(1, len(nodes))))


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Without our own variables, which would win over the config file that `up` hands down."""
    own = {
        option.variable
        for config_type in (UpConfig, WorkerConfig, GatewayConfig)
        for option in options_of(config_type).values()
    }
    kept = {k: v for k, v in environment.items() if k not in own and not k.startswith("PDRT_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}
