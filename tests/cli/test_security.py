"""What may be bound to a network, and with which key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdrt.cli.cores import Share
from pdrt.cli.deployment import deployment_of
from pdrt.cli.flags import parse_request
from pdrt.cli.main import main
from pdrt.cli.security import security_warnings
from pdrt.cli.validate import validate
from pdrt.config import GatewayConfig, SecurityConfig, UpConfig, WorkerConfig
from pdrt.errors import ConfigError
from pdrt.transfer.cluster_key import write_new_key

NETWORK = [
    "0.0.0.0",
    "192.168.1.2",
    "8.8.8.8",
    "*",
    "eth0",
    "worker.example",
    "127.1",
    "localhost.",
]
LOOPBACK = ["127.0.0.1", "127.8.9.1", "localhost"]
Config = WorkerConfig | GatewayConfig


def exposed(host: str, **security: object) -> list[Config]:
    settings = SecurityConfig(**security)  # type: ignore[arg-type]
    return [
        WorkerConfig(host=host, security=settings),
        GatewayConfig(worker_host=host, security=settings),
    ]


@pytest.mark.parametrize("host", NETWORK)
def test_a_port_that_others_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    for config, flag in zip(exposed(host), ("--host", "--worker-host"), strict=True):
        with pytest.raises(ConfigError) as caught:
            validate(config, has_cuda=False)
        text = str(caught.value)
        assert text.startswith(f"{flag} {host} can be reached from other machines")
        assert "pdrt keygen" in text and "--cluster-key" in text and "--insecure" in text
    for config in exposed(host, insecure=True):
        validate(config, has_cuda=False)
        (warning,) = security_warnings(config)
        assert host in warning and "without --cluster-key" in warning
    path = tmp_path / "key"
    write_new_key(str(path))
    for config in exposed(host, cluster_key=str(path)):
        validate(config, has_cuda=False)
        assert security_warnings(config) == []


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_needs_none(host: str) -> None:
    for config in exposed(host):
        validate(config, has_cuda=False)
        assert security_warnings(config) == []


def test_up_meets_on_loopback_whatever_clients_reach() -> None:
    config = UpConfig(host="0.0.0.0")
    validate(config, has_cuda=False)
    assert security_warnings(config) == []


@pytest.mark.parametrize("config", [WorkerConfig(), GatewayConfig(), UpConfig()])
def test_a_file_that_is_no_key_is_refused_at_start(
    config: Config | UpConfig, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    for text in (None, "no key"):
        if text is not None:
            path.write_text(text)
        security = SecurityConfig(cluster_key=str(path))
        with pytest.raises(ConfigError, match="--cluster-key"):
            validate(msgspec.structs.replace(config, security=security), has_cuda=False)


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new_key(str(path))
    config = WorkerConfig(security=SecurityConfig(cluster_key=str(path)))
    assert security_warnings(config) == []
    path.chmod(0o644)
    (warning,) = security_warnings(config)
    assert warning.endswith(f"chmod 600 {path}")


def test_as_flag_variable_and_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('cluster_key = "k"\ninsecure = true\n')
    for arguments, environment in (
        (["--cluster-key", "k", "--insecure"], {}),
        ([], {"PDRT_CLUSTER_KEY": "k", "PDRT_INSECURE": "true"}),
        (["--config", str(file)], {}),
    ):
        for role, kind in (("gateway", GatewayConfig), ("decode", WorkerConfig), ("up", UpConfig)):
            config = parse_request(role, kind, arguments, environment).config
            assert config.security == SecurityConfig(cluster_key="k", insecure=True)


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path)]) == 0
    text = path.read_text()
    said = capsys.readouterr().out
    assert f"--cluster-key {path}" in said and text.splitlines()[-1] not in said
    assert main(["keygen", str(path)]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert path.read_text() == text
    assert main(["keygen"]) == 2
    assert "FILE" in capsys.readouterr().err


def test_up_hands_its_key_to_every_role() -> None:
    security = SecurityConfig(cluster_key="k")
    shares = [Share((), 1), Share((), 1)]
    deployment = deployment_of(UpConfig(security=security), Path("m"), shares, ())
    assert [config.security for config in deployment.configs.values()] == [security] * 3
