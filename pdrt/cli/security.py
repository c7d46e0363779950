"""What may be reached from other machines, and with which key. Refused at start, or warned of."""

from __future__ import annotations

import ipaddress

from pdrt.config import GatewayConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError

Config = WorkerConfig | GatewayConfig | UpConfig


def check_security(config: Config) -> None:
    """Refuse a key that is none, and ports for processes that strangers could reach.

    Raises:
        ConfigError: says what to do.
    """
    if config.security.cluster_key is not None:
        from pdrt.transfer.cluster_key import read_key

        read_key(config.security)
    elif not config.security.insecure and (exposed := _exposed(config)) is not None:
        flag, host = exposed
        raise ConfigError(
            f"{flag} {host} can be reached from other machines, and nothing would keep strangers "
            f"out: make a key with `pdrt keygen FILE` and give --cluster-key FILE to every process "
            "of the cluster, or bind to 127.0.0.1 (--insecure does without, on a network that you "
            "trust)"
        )


def security_warnings(config: Config) -> list[str]:
    """What is allowed, and should be known."""
    path = config.security.cluster_key
    if path is not None:
        from pdrt.transfer.cluster_key import is_open_to_others

        if is_open_to_others(path):
            return [f"--cluster-key {path} can be read by other users: chmod 600 {path}"]
        return []
    if (exposed := _exposed(config)) is None:
        return []
    flag, host = exposed
    return [
        f"{flag} {host} without --cluster-key: whoever reaches its port can read prompts and "
        "outputs, and pass for a worker (--insecure)"
    ]


def _exposed(config: Config) -> tuple[str, str] | None:
    """The flag, and the address, that peers of this role can be on another machine by."""
    match config:
        case GatewayConfig(worker_host=host):
            flag = "--worker-host"
        case WorkerConfig(host=host):
            flag = "--host"
        case UpConfig():
            return None  # its processes meet on loopback
    return None if _is_loopback(host) else (flag, host)


def _is_loopback(host: str) -> bool:
    """A name counts as an address of a network, whatever it stands for by the time of binding."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
