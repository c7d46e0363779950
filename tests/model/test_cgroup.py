"""Limits of control groups, as files in a folder show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdrt.model.cgroup import System, available_memory_bytes, cpu_quota

MIB = 2**20


class Files:
    """What the kernel would show: `process` is /proc/self/cgroup, the rest is below the root."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "cgroup"
        self._root.mkdir()
        self._process = folder / "self"
        self._memory = folder / "meminfo"
        self._memory.write_text("MemTotal: 999999999 kB\nMemAvailable: 4194304 kB\n")
        self.system = System(self._root, self._process, self._memory)

    def is_in(self, *lines: str) -> None:
        self._process.write_text("".join(f"{line}\n" for line in lines))

    def say(self, path: str, text: str) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_machine_can_be_read() -> None:
    assert available_memory_bytes() > 0
    quota = cpu_quota()
    assert quota is None or quota > 0


def test_without_groups_there_is_no_limit_but_the_machine(files: Files) -> None:
    assert cpu_quota(files.system) is None
    assert available_memory_bytes(files.system) == 4096 * MIB


def test_version_2(files: Files) -> None:
    files.is_in("0::/user/pdrt")
    files.say("user/pdrt/cpu.max", "150000 100000")
    files.say("user/pdrt/memory.max", str(1024 * MIB))
    files.say("user/pdrt/memory.current", str(300 * MIB))
    files.say("user/pdrt/memory.stat", f"anon 1\ninactive_file {100 * MIB}\n")
    assert cpu_quota(files.system) == 1.5
    assert available_memory_bytes(files.system) == 824 * MIB


def test_version_1(files: Files) -> None:
    files.is_in("9:memory:/pdrt", "2:cpu,cpuacct:/pdrt", "1:name=systemd:/", "0::/")
    files.say("cpu,cpuacct/pdrt/cpu.cfs_quota_us", "50000")
    files.say("cpu,cpuacct/pdrt/cpu.cfs_period_us", "100000")
    files.say("memory/pdrt/memory.limit_in_bytes", str(512 * MIB))
    files.say("memory/pdrt/memory.usage_in_bytes", str(12 * MIB))
    assert cpu_quota(files.system) == 0.5
    assert available_memory_bytes(files.system) == 500 * MIB


def test_no_limit_is_said_in_words_or_below_zero(files: Files) -> None:
    files.is_in("0::/a", "1:cpu:/b")
    files.say("a/cpu.max", "max 100000")
    files.say("a/memory.max", "max")
    files.say("a/memory.current", "1")
    files.say("cpu/b/cpu.cfs_quota_us", "-1")
    files.say("cpu/b/cpu.cfs_period_us", "100000")
    assert cpu_quota(files.system) is None
    assert available_memory_bytes(files.system) == 4096 * MIB


def test_the_narrowest_limit_holds_wherever_it_is(files: Files) -> None:
    files.is_in("0::/slice/service/inner")
    files.say("slice/service/inner/cpu.max", "max 100000")
    files.say("slice/service/cpu.max", "400000 100000")
    files.say("slice/cpu.max", "200000 100000")
    files.say("slice/memory.max", str(100 * MIB))
    files.say("slice/memory.current", "0")
    files.say("slice/service/memory.max", str(200 * MIB))
    files.say("slice/service/memory.current", "0")
    assert cpu_quota(files.system) == 2.0
    assert available_memory_bytes(files.system) == 100 * MIB


def test_in_a_container_the_path_is_the_hosts_and_the_root_is_ours(files: Files) -> None:
    files.is_in("0::/../../docker/0123")
    files.say("cpu.max", "200000 100000")
    assert cpu_quota(files.system) == 2.0
    files.is_in("2:cpu:/docker/0123")
    files.say("cpu/cpu.cfs_quota_us", "100000")
    files.say("cpu/cpu.cfs_period_us", "100000")
    assert cpu_quota(files.system) == 1.0


def test_a_group_that_is_full_leaves_nothing(files: Files) -> None:
    files.is_in("0::/")
    files.say("memory.max", "100")
    files.say("memory.current", "200")
    assert available_memory_bytes(files.system) == 0
