"""Which wheel of mooncake is used, under which settings, and what is said otherwise."""

from __future__ import annotations

import pytest

from pdrt.config import MooncakeConfig
from pdrt.errors import ConfigError
from pdrt.transfer.mooncake import library
from pdrt.transfer.mooncake.library import (
    CPU_WHEEL,
    CUDA12_WHEEL,
    CUDA13_WHEEL,
    check_pool,
    import_failure,
    resolved,
    settings,
    unusable_environment,
    unusable_machine,
    unusable_wheels,
)

AUTO = MooncakeConfig()
TCP = MooncakeConfig(mooncake_protocol="tcp")
RDMA = MooncakeConfig(mooncake_protocol="rdma")


@pytest.mark.parametrize("wanted", [CPU_WHEEL, CUDA12_WHEEL, CUDA13_WHEEL])
def test_what_is_not_installed_is_named(wanted: str) -> None:
    why = unusable_wheels({}, wanted)
    assert why is not None and "not installed" in why
    assert f"the package {wanted})" in why and "pip install 'pdrt[mooncake" in why


@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "0.4.0rc1", "1.0"])
def test_versions_that_will_do(version: str) -> None:
    assert unusable_wheels({CPU_WHEEL: version}, CPU_WHEEL) is None


@pytest.mark.parametrize("version", ["0.3.11", "0.3.11.post9", "0.2", "garbage"])
def test_old_versions_are_refused(version: str) -> None:
    why = unusable_wheels({CPU_WHEEL: version}, CPU_WHEEL)
    assert why is not None and version in why and "0.3.12" in why


def test_two_wheels_are_refused() -> None:
    why = unusable_wheels({CPU_WHEEL: "0.3.13", CUDA12_WHEEL: "0.3.13"}, CPU_WHEEL)
    assert why is not None and f"pip uninstall {CUDA12_WHEEL} {CPU_WHEEL}" in why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MC_TCP_PROTO", "1"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "0"),
        ("MC_TCP_IO_BACKEND", "io_uring"),
        ("MC_USE_TENT", "1"),
    ],
)
def test_settings_that_break_what_we_rest_on(name: str, value: str) -> None:
    why = unusable_environment({name: value}, TCP)
    assert why is not None and f"{name}={value}" in why and "unset" in why


def test_other_settings_are_the_users() -> None:
    mine = {"MC_TCP_PROTO": "2", "MC_TCP_IO_BACKEND": "asio", "MC_TCP_LANES_PER_PEER": "9"}
    assert unusable_environment(mine, TCP) is None
    assert unusable_environment({"MC_FORCE_TCP": "1"}, TCP) is None


def test_rdma_never_becomes_tcp_in_silence() -> None:
    forced = unusable_environment({"MC_FORCE_TCP": "1"}, RDMA)
    assert forced is not None and "MC_FORCE_TCP=1" in forced and "rdma" in forced
    alone = unusable_machine(RDMA, [])
    assert alone is not None and "rdma" in alone and "--mooncake-protocol tcp" in alone
    assert unusable_machine(RDMA, ["mlx5_0"]) is None
    assert unusable_machine(TCP, []) is None


def test_tcp_is_tcp_on_a_machine_with_rdma_devices() -> None:
    assert settings(TCP)["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in settings(RDMA)


def test_auto_takes_rdma_where_there_is_some() -> None:
    assert resolved(AUTO, []) == TCP
    assert resolved(AUTO, ["mlx5_0"]) == RDMA
    assert resolved(TCP, ["mlx5_0"]) == TCP


def test_what_an_import_lacks() -> None:
    cuda = import_failure("libcudart.so.12: cannot open shared object file", CPU_WHEEL)
    assert "libcudart.so.12" in cuda and f"the package {CPU_WHEEL})" in cuda
    debian = import_failure("libibverbs.so.1: cannot open shared object file", CPU_WHEEL)
    assert "apt-get install -y libibverbs1 librdmacm1 libnuma1" in debian
    assert CPU_WHEEL in import_failure("No module named 'mooncake'", CPU_WHEEL)


def test_a_pool_on_a_gpu_needs_the_wheel_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed_wheels", lambda: {CPU_WHEEL: "0.3.13"})
    check_pool("cpu")
    with pytest.raises(ConfigError, match=f"without CUDA; pip uninstall {CPU_WHEEL}"):
        check_pool("cuda")
    monkeypatch.setattr(library, "installed_wheels", lambda: {CUDA12_WHEEL: "0.3.13"})
    check_pool("cuda")
