"""Finding and importing Mooncake's TransferEngine: which wheel, which version, which settings.

The library is configured by environment variables that it reads when it is imported or makes an
engine, and by nothing else: they are set here, before the import. Those that would take away what
the adapter's answers and fence rest on are refused.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from pdrt.config import MooncakeConfig
from pdrt.errors import ConfigError

TCP = "tcp"
VERSION_MIN = (0, 3, 12)
"""Before it, a write over TCP counted as done when it had been handed to the kernel."""

CPU_WHEEL = "mooncake-transfer-engine-non-cuda"
CUDA12_WHEEL = "mooncake-transfer-engine"
CUDA13_WHEEL = "mooncake-transfer-engine-cuda13"
EXTRAS = {
    CPU_WHEEL: "pdrt[mooncake]",
    CUDA12_WHEEL: "pdrt[mooncake-cuda]",
    CUDA13_WHEEL: "pdrt[mooncake-cuda13]",
}
WHEELS = (
    *EXTRAS,
    "mooncake-transfer-engine-efa",
    "mooncake-transfer-engine-efa-cuda13",
    "mooncake-transfer-engine-efa-non-cuda",
)
"""All write the same files: only one of them may be installed."""
DEBIAN_PACKAGES = "libibverbs1 librdmacm1 libnuma1"

LANES = 3
"""Connections per peer: while one waits for an acknowledgement, the others send. Two are slower, on
two cores also (measured: 1.5 GB/s of transfers of 64 KB; three 2.0, four 2.3). With more than three
what is on its way can outgrow the caches, and everything falls to 1.5 GB/s for a while."""
TIMEOUT_SECONDS = 10
"""After so long without progress the library gives a write up, and says so. It decides nothing
here: such a write is UNSETTLED whatever it says."""
QUEUED_TRANSFERS_MAX = 4096
"""Above any window of ours: a full queue fails writes and delays those after them."""


NOT_SUBMITTED = (0, -1, 2**64 - 1)
"""Instead of a transfer: the library's -1 comes as an unsigned number."""
RUNNING_CODES = (0, -2)
"""Of `transfer_check_status`; -2: late by the library's own clock, and still running."""
DONE_CODE = 1
"""Whatever else: failed. A transfer that has ended must never be asked for again."""


class Engine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Transfers are asked for by
    `transfer_check_status`, which knows only the first part of one that has several."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], sizes: list[int], /) -> int: ...
    def batch_unregister_memory(self, addresses: list[int], /) -> int: ...
    def transfer_submit_write(self, peer: str, source: int, target: int, size: int, /) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, targets: list[int], sources: list[int], sizes: list[int], /
    ) -> int: ...
    def transfer_check_status(self, transfer_id: int, /) -> int: ...


EngineFactory = Callable[[], Engine]


def installed_wheels() -> dict[str, str]:
    """Versions of the wheels that are installed, by name."""
    versions: dict[str, str] = {}
    for wheel in WHEELS:
        try:
            versions[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this machine."""
    folder = Path("/sys/class/infiniband")
    return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []


def wheel_for_this_machine() -> str:
    """The wheel whose CUDA is the one that PyTorch brings, or the one without."""
    cuda = torch.version.cuda
    if cuda is None or not Path("/dev/nvidiactl").exists():
        return CPU_WHEEL
    return CUDA12_WHEEL if cuda.startswith("12") else CUDA13_WHEEL


def resolved(config: MooncakeConfig, devices: Sequence[str]) -> MooncakeConfig:
    """With the protocol that `auto` means on a machine with these RDMA devices."""
    if config.mooncake_protocol != "auto":
        return config
    return msgspec.structs.replace(config, mooncake_protocol="rdma" if devices else TCP)


def load(config: MooncakeConfig) -> EngineFactory:
    """Import the library with our settings.

    Raises:
        ConfigError: it is not installed, or not one that can be used; names the package.
    """
    config = resolved(config, rdma_devices())
    why = (
        unusable_wheels(installed_wheels(), wheel_for_this_machine())
        or unusable_environment(os.environ, config)
        or unusable_machine(config, rdma_devices())
    )
    if why is not None:
        raise ConfigError(why)
    for name, value in settings(config).items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(import_failure(str(error), wheel_for_this_machine())) from error
    factory: EngineFactory = module.TransferEngine
    return factory


def settings(config: MooncakeConfig) -> dict[str, str]:
    """Environment variables for the library. Where one is set already, that stays."""
    chosen = {
        "MC_TCP_LANES_PER_PEER": str(LANES),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(QUEUED_TRANSFERS_MAX),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(TIMEOUT_SECONDS),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(TIMEOUT_SECONDS),
        "MC_LOG_LEVEL": "ERROR",
    }
    if config.mooncake_protocol == TCP:
        # Where there are RDMA devices it would take those, whatever protocol it is given.
        chosen["MC_FORCE_TCP"] = "1"
    return chosen


def unusable_wheels(installed: Mapping[str, str], wanted: str) -> str | None:
    """Why none of these can be used, in words; `wanted` is the wheel for this machine."""
    if not installed:
        return f"the mooncake engine is not installed; {_install(wanted)}"
    if len(installed) > 1:
        names = sorted(installed)
        return (
            f"{' and '.join(names)} are installed, which overwrite each other's files; "
            f"pip uninstall {' '.join(names)}, then {_install(wanted)}"
        )
    ((wheel, version),) = installed.items()
    if _numbers(version) < VERSION_MIN:
        return (
            f"{wheel} {version} is installed, which says that a write is done before it is; "
            f"{'.'.join(map(str, VERSION_MIN))} or newer is needed: {_install(wanted)}"
        )
    return None


def check_pool(device: str) -> None:
    """Refuse a pool on a GPU whose memory the wheel that is installed would take for its own.

    Raises:
        ConfigError: names the package for this machine.
    """
    if device != "cpu" and any("non-cuda" in wheel for wheel in installed_wheels()):
        raise ConfigError(
            f"the KV pool is on {device}, and mooncake is installed without CUDA; pip uninstall "
            f"{' '.join(installed_wheels())}, then {_install(wheel_for_this_machine())}"
        )


def unusable_environment(environment: Mapping[str, str], config: MooncakeConfig) -> str | None:
    """Why the library may not be used under these variables, in words."""
    if environment.get("MC_TCP_PROTO") == "1":
        return (
            "MC_TCP_PROTO=1 is set: with it the mooncake engine says that a write is done before "
            "it is; unset it"
        )
    for name, usual in (
        ("MC_TCP_ENABLE_CONNECTION_POOL", None),
        ("MC_TCP_IO_BACKEND", "asio"),
        ("MC_USE_TENT", None),
    ):
        if environment.get(name, usual) != usual:
            return (
                f"{name}={environment[name]} is set: the mooncake engine's fence has not been "
                "tested with it; unset it"
            )
    forced = environment.get("MC_FORCE_TCP")
    if config.mooncake_protocol != TCP and forced is not None:
        return (
            f"MC_FORCE_TCP={forced} is set, and --mooncake-protocol is "
            f"{config.mooncake_protocol}; unset it, or use --mooncake-protocol tcp"
        )
    return None


def unusable_machine(config: MooncakeConfig, devices: Sequence[str]) -> str | None:
    """Why this machine cannot carry the protocol, in words."""
    if config.mooncake_protocol == "rdma" and not devices:
        return (
            "--mooncake-protocol rdma needs an RDMA device, and /sys/class/infiniband has none "
            "(the library would use TCP without a word); use --mooncake-protocol tcp"
        )
    return None


def import_failure(error: str, wanted: str) -> str:
    """What to do about an import that failed, from its words."""
    if "libcudart" in error or "libcuda" in error:
        return (
            f"the mooncake engine that is installed needs CUDA ({error}); for this machine: "
            f"pip uninstall {' '.join(installed_wheels())}, then {_install(wanted)}"
        )
    if ".so" in error:
        return (
            f"the mooncake engine lacks a library ({error}); on Debian or Ubuntu: "
            f"sudo apt-get install -y {DEBIAN_PACKAGES}"
        )
    return f"the mooncake engine cannot be imported ({error}); {_install(wanted)}"


def _install(wheel: str) -> str:
    return f"pip install '{EXTRAS[wheel]}' (the package {wheel})"


def _numbers(version: str) -> tuple[int, ...]:
    """0.3.13.post1 → (0, 3, 13)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
