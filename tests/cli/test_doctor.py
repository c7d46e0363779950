"""`pdrt doctor`: its judgements, and that no machine, however odd, makes it fall over."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pdrt.cli.doctor import hardware, software, system
from pdrt.cli.doctor.command import checks, examine
from pdrt.cli.doctor.finding import GIB, Finding, Verdict, ok
from pdrt.cli.main import main

OK, WARNING, FAILS = Verdict.OK, Verdict.WARNING, Verdict.FAILS
UNLIMITED = resource.RLIM_INFINITY
FLAGS = {
    "no_torch": True,
    "host": "127.0.0.1",
    "port": 0,
    "worker_port": 0,
    "kv_cache_memory_bytes": GIB,
}


def agrees(finding: Finding, verdict: Verdict) -> bool:
    """And whatever is not ok says what to do."""
    return finding.verdict is verdict and bool(finding.remedy) == (verdict is not OK)


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (software.python((3, 11, 2)), OK),
        (software.python((3, 10, 9)), FAILS),
        (hardware.cpu_features({"avx2", "avx512f", "avx512_bf16"}), OK),
        (hardware.cpu_features({"avx2"}), OK),
        (hardware.cpu_features({"sse4_2"}), WARNING),
        (hardware.cpu_features(set()), WARNING),
        (hardware.cores(2, 8, None), OK),
        (hardware.cores(1, 1, None), WARNING),
        (hardware.cores(8, 8, 0.5), WARNING),
        (hardware.cores(8, 8, 1.5), WARNING),
        (hardware.memory(16 * GIB, GIB), OK),
        (hardware.memory(3 * GIB, GIB), WARNING),
        (hardware.memory(2 * GIB, GIB), FAILS),
        (hardware.memory(16 * GIB, 8 * GIB), FAILS),
        (hardware.open_files(UNLIMITED, UNLIMITED), OK),
        (hardware.open_files(1024, 4096), OK),
        (hardware.open_files(1024, 1024), WARNING),
        (hardware.open_files(64, 64), FAILS),
        (hardware.locked_memory(64 * 1024, has_rdma=False), OK),
        (hardware.locked_memory(64 * 1024, has_rdma=True), WARNING),
        (hardware.locked_memory(UNLIMITED, has_rdma=True), OK),
        (hardware.rdma([], has_library=False), OK),
        (hardware.rdma(["mlx5_0"], has_library=False), WARNING),
        (hardware.rdma(["mlx5_0"], has_library=True), OK),
        (system.proxies({}), OK),
        (system.proxies({"http_proxy": "http://p:3128"}), WARNING),
        (system.proxies({"http_proxy": "x", "no_proxy": "localhost, 127.0.0.1"}), OK),
    ],
)
def test_a_judgement(finding: Finding, verdict: Verdict) -> None:
    assert agrees(finding, verdict), finding


def test_costs_are_named() -> None:
    assert "float32" in hardware.cpu_features({"avx2"}).text
    assert "float32" not in hardware.cpu_features({"avx2", "avx512f", "amx_bf16"}).text


def test_packages() -> None:
    wanted = [Requirement(text) for text in ("one>=1", "two>=2,<3", "three")]
    found = software.packages(wanted, {"one": "1.5", "two": "3.1"}.get)
    assert [(f.name, f.verdict) for f in found] == [
        ("packages", OK),
        ("two", FAILS),
        ("three", FAILS),
    ]
    assert found[1].remedy == "pip install 'two<3,>=2'"
    assert software.packages([])[0].verdict is WARNING


def test_a_local_build_is_the_version_it_names() -> None:
    (found,) = software.packages([Requirement("torch>=2.11,<2.15")], lambda _: "2.13.0+cpu")
    assert found.verdict is OK


def test_the_mooncake_package_that_fits() -> None:
    cuda, plain = "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"
    assert agrees(software.mooncake(False, {}.get), OK)
    assert agrees(software.mooncake(False, {plain: "1"}.get), OK)
    assert agrees(software.mooncake(True, {cuda: "1"}.get), OK)
    assert "pdrt[mooncake]" in software.mooncake(False, {cuda: "1"}.get).remedy
    assert "pdrt[mooncake-cuda]" in software.mooncake(True, {plain: "1"}.get).remedy
    cuda13 = "mooncake-transfer-engine-cuda13"
    found = software.mooncake(True, {cuda13: "1"}.get)
    assert agrees(found, OK) and found.text == f"{cuda13} 1"
    assert "pdrt[mooncake]" in software.mooncake(False, {cuda13: "1"}.get).remedy


def test_torch_builds() -> None:
    facts: dict[str, Any] = {"version": "2", "threads": 2, "capability": "AVX2", "gpus": []}
    cpu, cuda = facts | {"cuda_build": None}, facts | {"cuda_build": "13.0"}
    assert agrees(software.judge_torch(cpu, has_gpu=False)[0], OK)
    assert agrees(software.judge_torch(cpu, has_gpu=True)[0], WARNING)
    assert agrees(software.judge_torch(cuda, has_gpu=True)[0], WARNING)
    assert agrees(software.judge_torch(cuda | {"gpus": ["H200"]}, has_gpu=True)[0], OK)


def test_what_the_local_engine_needs_is_tried() -> None:
    assert agrees(system.shared_memory(), OK)
    assert agrees(system.pidfd(), OK)
    assert agrees(system.loopback(), OK)
    assert agrees(system.pid_namespace(), OK)


def test_a_kernel_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("os.pidfd_open", refuse)
    assert agrees(system.pidfd(), FAILS)


def test_proc_of_another_namespace(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert agrees(system.pid_namespace(tmp_path), FAILS)
    assert agrees(system.ptrace(tmp_path), OK)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, free = system.ports("127.0.0.1", {"--port": port, "--worker-port": 0})
    assert agrees(taken, WARNING)
    assert str(port) in taken.text
    assert agrees(free, OK)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    assert agrees(system.model_cache(tmp_path / "to" / "be" / "made")[0], OK)
    (tmp_path / "file").write_text("in the way")
    assert agrees(system.model_cache(tmp_path / "file" / "models")[0], FAILS)


def test_a_check_that_breaks_is_told_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise FileNotFoundError("/proc/odd")

    found = examine({"odd": broken, "even": lambda: ok("even", "yes")})
    assert [(f.name, f.verdict) for f in found] == [("odd", WARNING), ("even", OK)]
    assert "/proc/odd" in found[0].text


def test_without_any_file_of_the_kernel_it_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container where /proc and /sys are hidden."""
    read, listed = Path.read_text, os.listdir

    def is_hidden(path: Any) -> bool:
        return str(path).startswith(("/proc", "/sys"))

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        if is_hidden(self):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(self))
        return read(self, *args, **options)

    def listdir(path: Any = ".") -> list[str]:
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("os.listdir", listdir)
    names = [finding.name for finding in examine(checks(FLAGS))]
    assert {"python", "cpu features", "cores", "memory", "processes", "model cache"} <= set(names)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--no-torch", "--json", "--port", "0", "--worker-port", "0"]
    code = main([*arguments, "--kv-cache-memory-bytes", "1000000"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["verdict"] == "fails" for finding in found))
    assert {"name", "verdict", "text", "remedy"} == set(found[0])
    assert main([*arguments, "--kv-cache-memory-bytes", str(2**50)]) == 1, "no such memory"
    assert main(["doctor", "--kv-cache-memory-bytes", "0"]) == 2


def test_the_table_is_readable_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--no-torch", "--port", "0", "--worker-port", "0"])
    text = capsys.readouterr().out
    assert "cpu features" in text
    assert "shared memory" in text
    assert "\x1b" not in text
