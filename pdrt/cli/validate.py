"""The one place that refuses a config: ranges from the types, then what fields say together."""

from __future__ import annotations

import importlib.util
import re

from pdrt.cli.load import Given, convert
from pdrt.cli.options import options_of, value_of
from pdrt.cli.security import check_security
from pdrt.config import (
    DeviceConfig,
    GatewayConfig,
    ModelConfig,
    ProtocolConfig,
    SchedulerConfig,
    UpConfig,
    WorkerConfig,
)
from pdrt.errors import ConfigError
from pdrt.model.resources import parse_id_list
from pdrt.observe.tracing import check_tracing

_HOST = r"[^:\[\]/\s]+"

HANG_SECONDS_LEAST = 5.0
"""Roles beat once a second; on a busy machine beats come late."""


def validate(config: WorkerConfig | GatewayConfig | UpConfig, *, has_cuda: bool) -> None:
    """Raises `ConfigError`, naming the flag. `has_cuda`: an NVIDIA GPU is on this machine."""
    for option in options_of(type(config)).values():
        convert(option, Given(value_of(config, option), option.flag, False))
    _check_protocol(config.protocol)
    check_tracing(config.observe.otlp_endpoint)
    _check_host("--host", config.host)
    if isinstance(config, GatewayConfig):
        _check_host("--worker-host", config.worker_host)
    check_security(config)
    match config:
        case GatewayConfig():
            return
        case WorkerConfig():
            for address in config.gateway:
                parse_address("--gateway", address)
        case UpConfig():
            if config.hang_seconds_max < HANG_SECONDS_LEAST:
                raise ConfigError(
                    f"--hang-seconds-max {config.hang_seconds_max} must not be shorter than "
                    f"{HANG_SECONDS_LEAST:g}: a role under load may be silent for some seconds"
                )
    _check_device(config.device, has_cuda)
    _check_lengths(config.model, config.scheduler)
    _check_checksum(config.model)


def _check_protocol(protocol: ProtocolConfig) -> None:
    if protocol.silence_seconds <= protocol.hello_interval_seconds:
        raise ConfigError(
            f"--silence-seconds {protocol.silence_seconds} must be longer than "
            f"--hello-interval-seconds {protocol.hello_interval_seconds}"
        )
    if protocol.revoke_resend_seconds_max < protocol.revoke_resend_seconds:
        raise ConfigError(
            f"--revoke-resend-seconds-max {protocol.revoke_resend_seconds_max} must not be "
            f"shorter than --revoke-resend-seconds {protocol.revoke_resend_seconds}"
        )
    # Sooner, a fence would begin while the writer may still settle by itself.
    settled = protocol.write_seconds_max + protocol.retire_seconds_max
    if protocol.fence_after_seconds <= settled:
        raise ConfigError(
            f"--fence-after-seconds {protocol.fence_after_seconds} must be longer than "
            f"--write-seconds-max {protocol.write_seconds_max} and "
            f"--retire-seconds-max {protocol.retire_seconds_max} together"
        )


def _check_device(device: DeviceConfig, has_cuda: bool) -> None:
    if device.gpus is not None:
        parse_id_list(device.gpus, "--gpus")
        if device.device == "cpu":
            raise ConfigError("--gpus and --device cpu exclude each other; leave one out")
    if device.cpus is not None:
        parse_id_list(device.cpus, "--cpus")
    if not has_cuda and (device.device == "cuda" or device.gpus is not None):
        flag = "--device cuda" if device.device == "cuda" else f"--gpus {device.gpus}"
        raise ConfigError(f"{flag}: no NVIDIA GPU on this machine; use --device cpu")


def _check_lengths(model: ModelConfig, scheduler: SchedulerConfig) -> None:
    if not model.model.strip():
        raise ConfigError("--model is empty")
    if model.max_model_len is not None and model.max_model_len < 2:
        raise ConfigError(
            "--max-model-len must hold a prompt token and an output token: 2 at least"
        )
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} must not be below "
            f"--max-num-seqs {scheduler.max_num_seqs}: a decode step needs a token for each"
        )


def _check_checksum(model: ModelConfig) -> None:
    if model.kv_checksum and importlib.util.find_spec("xxhash") is None:
        raise ConfigError("--kv-checksum needs xxhash: pip install 'pdrt[checksum]'")


def _check_host(flag: str, host: str) -> None:
    if ":" in host:
        raise ConfigError(f"{flag} {host!r}: IPv6 is not supported; use an IPv4 address or a name")
    if re.fullmatch(_HOST, host) is None:
        raise ConfigError(f"{flag} {host!r} is not an address to bind to")


def parse_address(flag: str, text: str) -> tuple[str, int]:
    """`HOST:PORT`, the host an IPv4 address or a name."""
    if text.count(":") > 1:
        raise ConfigError(f"{flag} {text!r}: IPv6 is not supported; use an IPv4 address or a name")
    match = re.fullmatch(rf"({_HOST}):([0-9]{{1,5}})", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(f"{flag} {text!r} is not HOST:PORT")
    return match[1], int(match[2])
