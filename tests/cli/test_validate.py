"""What is refused at start, and that the text names the flag."""

from __future__ import annotations

import socket

import msgspec
import pytest

from pdrt.cli.flags import parse_request
from pdrt.cli.ports import check_port
from pdrt.cli.validate import parse_address, validate
from pdrt.config import GatewayConfig, ModelConfig, ObserveConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError
from pdrt.gateway.server import bind_http


def refuse(*arguments: str, has_cuda: bool = False) -> str:
    config = parse_request("decode", WorkerConfig, arguments, {}).config
    with pytest.raises(ConfigError) as caught:
        validate(config, has_cuda=has_cuda)
    return str(caught.value)


@pytest.mark.parametrize("config", [UpConfig(), WorkerConfig(), GatewayConfig()])
def test_defaults_are_valid(config: UpConfig | WorkerConfig | GatewayConfig) -> None:
    validate(config, has_cuda=False)
    validate(config, has_cuda=True)


def test_ranges_hold_for_configs_made_in_code() -> None:
    with pytest.raises(ConfigError, match="--page-size: 0 is out of range, must be >= 1"):
        validate(WorkerConfig(model=ModelConfig(page_size=0)), has_cuda=False)


def test_a_page_size_need_not_be_a_power_of_two() -> None:
    validate(WorkerConfig(model=ModelConfig(page_size=24)), has_cuda=False)


def test_devices() -> None:
    assert refuse("--device", "cuda") == (
        "--device cuda: no NVIDIA GPU on this machine; use --device cpu"
    )
    assert "use --device cpu" in refuse("--gpus", "0")
    assert "exclude each other" in refuse("--gpus", "0", "--device", "cpu", has_cuda=True)
    assert "--gpus '0-'" in refuse("--gpus", "0-", has_cuda=True)
    assert "--cpus 'all'" in refuse("--cpus", "all")


@pytest.mark.parametrize(
    "flags", [("--tensor-parallel-size", "2"), ("--gpus", "0-3"), ("--gpus", "0,1")]
)
def test_a_worker_may_have_several_ranks(flags: tuple[str, str]) -> None:
    config = parse_request("prefill", WorkerConfig, flags, {}).config
    validate(config, has_cuda=True)


def test_up_deals_out_several_devices() -> None:
    config = parse_request("up", UpConfig, ["--gpus", "0-3"], {}).config
    validate(config, has_cuda=True)


def test_fields_that_contradict_each_other() -> None:
    assert "--silence-seconds" in refuse("--silence-seconds", "1")
    assert "--revoke-resend-seconds-max" in refuse("--revoke-resend-seconds", "3")
    assert refuse("--fence-after-seconds", "40") == (
        "--fence-after-seconds 40.0 must be longer than "
        "--write-seconds-max 30.0 and --retire-seconds-max 10.0 together"
    )
    assert "--fence-after-seconds 45.0" in refuse("--retire-seconds-max", "15")
    assert "--max-num-batched-tokens" in refuse("--max-num-batched-tokens", "8")
    assert "--max-model-len" in refuse("--max-model-len", "1")
    assert "--model" in refuse("--model", "")
    assert "--gateway 'nowhere'" in refuse("--gateway", "nowhere")
    assert "--gateway 'host:99999'" in refuse("--gateway", "host:99999")


def test_addresses() -> None:
    assert parse_address("--gateway", "host.example:1") == ("host.example", 1)
    for text in (
        "",
        "host",
        "host:",
        ":1",
        "[x]:1",
        "tcp//h:1",
        "host:0",
        "host:٣",
        "host:65536",
        "host:1x",
    ):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            parse_address("--gateway", text)


def test_ipv6_is_refused_in_words() -> None:
    refusal = "IPv6 is not supported; use an IPv4 address or a name"
    for text in ("[::1]:8001", "::1:8001"):
        assert refuse("--gateway", text) == f"--gateway {text!r}: {refusal}"
    assert refuse("--host", "::") == f"--host '::': {refusal}"
    for config, flag in (
        (GatewayConfig(host="::1"), "--host"),
        (GatewayConfig(worker_host="::1"), "--worker-host"),
        (UpConfig(host="::1"), "--host"),
    ):
        with pytest.raises(ConfigError, match=rf"{flag} '::1': {refusal}"):
            validate(config, has_cuda=False)


def test_a_name_of_this_host_is_bound_by_its_ipv4_address() -> None:
    with bind_http("localhost", 0) as listener:
        assert listener.family is socket.AF_INET
    check_port("--port", "localhost", 0)


@pytest.mark.parametrize("config", [UpConfig(), GatewayConfig(), WorkerConfig()])
def test_a_collector_that_is_none_is_refused_before_anything_starts(
    config: UpConfig | GatewayConfig | WorkerConfig,
) -> None:
    observe = ObserveConfig(otlp_endpoint="localhost:4318")
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        validate(msgspec.structs.replace(config, observe=observe), has_cuda=False)


def test_a_role_is_not_killed_for_a_late_beat() -> None:
    with pytest.raises(ConfigError, match=r"--hang-seconds-max 1\.0 must not be shorter than 5"):
        validate(UpConfig(hang_seconds_max=1.0), has_cuda=False)
    validate(UpConfig(hang_seconds_max=5.0), has_cuda=False)


def test_checksums_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_request("prefill", WorkerConfig, ["--kv-checksum"], {}).config
    assert config.model.kv_checksum
    validate(config, has_cuda=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'pdrt[checksum]'" in refuse("--kv-checksum")
    validate(WorkerConfig(), has_cuda=False)
