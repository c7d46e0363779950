"""Each example file loads, is valid, and together they make a deployment that meets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdrt.cli.flags import parse_request
from pdrt.cli.validate import parse_address, validate
from pdrt.config import GatewayConfig, UpConfig, WorkerConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TYPES: dict[str, type[UpConfig] | type[WorkerConfig] | type[GatewayConfig]] = {
    "laptop": UpConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "gateway": GatewayConfig,
}


def load(name: str) -> UpConfig | WorkerConfig | GatewayConfig:
    arguments = ["--config", str(CONFIGS / f"{name}.toml")]
    return parse_request(name, TYPES[name], arguments, {}).config


def test_every_file_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == TYPES.keys()


@pytest.mark.parametrize("name", TYPES)
def test_it_loads_and_is_valid(name: str) -> None:
    config = load(name)
    assert config != TYPES[name]()
    validate(config, has_cuda=False)


def test_workers_dial_the_gateway_and_agree_on_the_model() -> None:
    gateway, prefill, decode = load("gateway"), load("prefill"), load("decode")
    assert isinstance(gateway, GatewayConfig)
    assert isinstance(prefill, WorkerConfig) and isinstance(decode, WorkerConfig)
    for worker in (prefill, decode):
        assert parse_address("--gateway", worker.gateway[0])[1] == gateway.worker_port
        assert worker.model.model == gateway.model
    pool = {"kv_cache_memory_bytes": None}
    assert msgspec.structs.replace(prefill.model, **pool) == msgspec.structs.replace(
        decode.model, **pool
    )
